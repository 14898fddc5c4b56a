"""Texts of the page in the languages of its users."""
