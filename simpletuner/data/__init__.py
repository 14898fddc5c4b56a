"""From the entries of a dataset file to batches; only the loader imports torch.

docs/ARCHITECTURE.md ("Inside data/") says which question each module answers, in the order in which
they read well.
"""
