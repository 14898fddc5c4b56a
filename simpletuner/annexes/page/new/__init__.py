"""The place New: the drop, what a card can train, and examples."""
