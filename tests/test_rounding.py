"""Whole numbers, rounded up."""

from __future__ import annotations

from simpletuner.rounding import ceil_div, round_up


def test_ceil_div_rounds_up() -> None:
    assert [ceil_div(number, 4) for number in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_round_up_returns_the_next_multiple() -> None:
    assert [round_up(number, 16) for number in (0, 1, 16, 17)] == [0, 16, 16, 32]
