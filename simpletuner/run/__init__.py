"""The composition root: runs a plan from the caches to the trained, verified result."""
