"""Fixtures of the core, extended for the annexes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simpletuner.annexes.remote.collect import collect
from simpletuner.data.entries import DataContext
from tests.data.conftest import context as local_context

__all__ = ["local_context"]


@pytest.fixture
def context(local_context: DataContext) -> DataContext:
    """The context of tests/data, with remote datasets."""
    return replace(local_context, collect=collect)
