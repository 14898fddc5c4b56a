"""Techniques as the plan sees them: their rules, cost and data; `simpletuner.techniques` trains."""
