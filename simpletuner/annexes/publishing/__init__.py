"""Uploads to the hub, and model cards."""
