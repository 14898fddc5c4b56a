"""What a person sees of a run in a terminal or a log: plain lines (progress), or a live display (terminal)."""
