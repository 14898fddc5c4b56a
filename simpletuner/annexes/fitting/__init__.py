"""`offload: auto`, and changes that make a plan fit."""
