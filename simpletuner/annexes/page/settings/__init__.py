"""The place Settings: the form of a config, its files, and its preview prompts."""
