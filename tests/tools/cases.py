"""Cases of a test of which a few are enough for every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first_of(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """The first cases for every run; the rest, which repeats their promise, only with --all."""
    ordered = list(cases)
    rest = []
    for case in ordered[count:]:
        values = case if isinstance(case, tuple) else (case,)  # of several arguments, or of one
        rest.append(pytest.param(*values, marks=pytest.mark.thorough))
    return ordered[:count] + rest
