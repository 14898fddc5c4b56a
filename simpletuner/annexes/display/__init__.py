"""Displays of a run: plain lines, a live terminal display, and the debug log."""
