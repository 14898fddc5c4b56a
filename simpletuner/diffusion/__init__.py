"""Batches, flow matching, losses and seeds."""
