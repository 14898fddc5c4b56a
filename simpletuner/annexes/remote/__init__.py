"""Datasets from tables and the hub."""
