"""One stream of events, and the record of a run."""
