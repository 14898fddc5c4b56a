"""Repeats a failed step, to name its cause."""
