"""Displays of a run: plain lines (progress), a live terminal display (terminal), and the debug log
(log).
"""
