"""Kandinsky 5 Image and Video."""
