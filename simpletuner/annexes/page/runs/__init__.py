"""The place Runs: the list, a run's page, its result, and the queue."""
