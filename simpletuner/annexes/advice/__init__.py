"""What to do next with a run, as one sentence, from what the run has recorded."""
