"""Previews, and the loss on held-out data."""
