"""Features around the core, which imports none of them."""
