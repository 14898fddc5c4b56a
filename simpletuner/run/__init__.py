"""The composition root: runs a plan, from filling the caches to the verified result."""
