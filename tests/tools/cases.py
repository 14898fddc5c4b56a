"""Cases of a test of which a few are enough for every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The first cases for every run; the rest, which repeats their promise, only with --all."""
    ordered = list(cases)
    rest = [pytest.param(case, marks=pytest.mark.thorough) for case in ordered[count:]]
    return ordered[:count] + rest
