"""Random choices that depend on their parts alone."""

from __future__ import annotations

import pytest

from simpletuner.data import chance


def test_fractions_depend_on_their_parts_alone() -> None:
    assert chance.fraction("a", 1) == chance.fraction("a", 1)
    assert chance.fraction("a", 1) != chance.fraction("a", 2)


def test_a_fraction_is_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caption that is kept with a probability of 1 must be kept."""
    monkeypatch.setattr(chance, "order_key", lambda *parts: b"\xff" * 32)
    assert chance.fraction("a") < 1
