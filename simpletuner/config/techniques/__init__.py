"""Keys of techniques, a file for each; `schema.technique_groups` collects them."""
