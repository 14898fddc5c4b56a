"""Writes captions, and draws the page of a dataset."""
