"""The memory, time and disk that a plan needs."""
