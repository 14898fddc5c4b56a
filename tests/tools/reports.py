"""What checks report, as a value: checks of the program add to a report that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpletuner.errors import Problems


def found_by(check: Callable[..., Any], *arguments: Any, **named: Any) -> Problems:
    """The problems that a check reports."""
    report = Problems()
    check(*arguments, report=report, **named)
    return report


def read_by(reader: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[Any, Problems]:
    """What a reader returns, and the problems that it reports."""
    report = Problems()
    result = reader(*arguments, report=report, **named)
    return result, report
