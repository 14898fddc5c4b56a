"""Fixtures of rooms that the annexes stand around."""

from tests.data.conftest import context

__all__ = ["context"]
