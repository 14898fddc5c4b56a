"""What the program warns of."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def our_warnings() -> Iterator[list[str]]:
    """The warnings and errors that the program logs in this process; libraries do not count."""
    collector = _Collector()
    ours = logging.getLogger("simpletuner")
    ours.addHandler(collector)
    try:
        yield collector.texts
    finally:
        ours.removeHandler(collector)
