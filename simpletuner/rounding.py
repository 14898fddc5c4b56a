"""Division of whole numbers that rounds up."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number."""
    return ceil_div(number, multiple) * multiple
