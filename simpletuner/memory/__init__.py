"""Dtypes and quantised layers, and the memory that the process returns."""
