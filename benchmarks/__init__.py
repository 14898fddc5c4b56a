"""How fast things are, in ratios of one run. Run from the repository:
`python -m benchmarks.step`.
"""
