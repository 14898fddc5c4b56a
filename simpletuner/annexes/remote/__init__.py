"""Datasets that are downloaded: from tables of addresses, and from the hub."""
