"""What a cached caption or picture depends on, and how it lies on disk."""
