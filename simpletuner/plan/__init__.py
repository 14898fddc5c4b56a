"""Everything that can be known and checked before a weight is loaded. Free of torch."""
