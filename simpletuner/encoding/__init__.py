"""Fills the caches and reads them."""
