"""Runs as their folders and processes show them; the page reads them anew for every request."""
