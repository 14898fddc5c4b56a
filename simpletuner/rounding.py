"""Division of whole numbers that rounds up."""

from __future__ import annotations


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    # Integer division rounds down, so that of the negative number rounds away from zero.
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number."""
    return ceil_div(number, multiple) * multiple
