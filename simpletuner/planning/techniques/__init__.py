"""Techniques as the plan sees them: rules, cost and needed data of each. What trains is in
`simpletuner.techniques`.
"""
