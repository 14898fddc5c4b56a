"""The conversation of `simpletuner configure`."""
