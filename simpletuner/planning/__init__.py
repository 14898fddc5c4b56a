"""Everything that is decided before a weight is loaded."""
