"""Asking questions, one at a time, in a terminal or through a pipe."""
