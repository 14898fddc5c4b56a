"""Uploads and model cards."""
