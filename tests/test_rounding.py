"""Whole numbers, rounded up."""

from __future__ import annotations

from simpletuner.rounding import ceil_div, round_up


def test_a_remainder_makes_a_quotient_one_larger() -> None:
    assert [ceil_div(number, 4) for number in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_number_is_rounded_up_to_a_multiple_unless_it_is_one() -> None:
    assert [round_up(number, 16) for number in (0, 1, 16, 17)] == [0, 16, 16, 32]
