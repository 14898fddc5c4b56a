"""Sana Video."""
