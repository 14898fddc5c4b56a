"""Growing files of JSON lines: followed from line to line, or read at their end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from simpletuner.annexes.figures import Columns
from simpletuner.annexes.payloads import last_lines
from simpletuner.redaction import redact
from simpletuner.reporting.metrics import METRICS_FILE, parse_row

PART = 1 << 18  # bytes read at a time; maximum length of a line


@dataclass(eq=False)
class Tail:
    """Follows a growing file of JSON lines: returns every line once, a part at a time.

    Attributes:
        number: a key that every object must have, with an integer value.
        renew: called before a replaced or truncated file is read again.
        damage: describes the first invalid complete line; empty if there is none.
    """

    path: Path
    number: str
    renew: Callable[[], None] = lambda: None
    damage: str = field(default="", init=False)
    _file: int = field(default=0, init=False)
    _offset: int = field(default=0, init=False)

    def lines(self) -> list[bytes]:
        """The next complete lines; none at the end of the file."""
        try:
            # Only a regular file: opening a pipe would block.
            file = self.path.open("rb") if self.path.is_file() else None
        except FileNotFoundError:  # a new run has just deleted it
            file = None
        if file is None:
            if self._file:
                self._restart(0)
            return []
        with file:
            status = os.fstat(file.fileno())
            # Detects an atomic replacement and truncation.
            if status.st_ino != self._file or status.st_size < self._offset:
                self._restart(status.st_ino)
            file.seek(self._offset)
            part = file.read(PART)
        end = part.rfind(b"\n") + 1
        if end == 0 and len(part) == PART:
            # A line longer than PART is not an event: it is returned in pieces that do not parse.
            end = PART
        self._offset += end
        return part[:end].splitlines(keepends=True)

    def _restart(self, file: int) -> None:
        self._file = file
        self._offset = 0
        self.damage = ""
        self.renew()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The objects in all new lines."""
        while lines := self.lines():
            yield from filter(None, map(self.parse, lines))

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """The object in a line; None if the line is invalid."""
        row = parse_row(line, self.number)
        if row is None:
            self.reject(line)
        return row

    def reject(self, line: bytes) -> None:
        """Record an invalid line; only the first one is reported."""
        self.damage = self.damage or damage_of(self.path, line)


def damage_of(path: Path, line: bytes) -> str:
    """The message about an invalid line."""
    text = redact(line.decode(errors="replace").strip())
    return f"{path.name} has an invalid line: {text:.200}"


class Record:
    """The metrics of a run; only new lines are read."""

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()
        self._columns = Columns()
        self._tail = Tail(folder / METRICS_FILE, "step", renew=self._begin)

    def _begin(self) -> None:
        self._columns = Columns()

    def read(self) -> tuple[Columns, str]:
        """The metrics of all steps, and a message about an invalid line."""
        with self._lock:
            for row in self._tail.rows():
                self._columns.add(row)
            return self._columns, self._tail.damage


# The columns of 100,000 steps take about 15 MB, so only those of recently viewed runs are cached.
record_in = lru_cache(maxsize=3)(Record)


def last_step(path: Path) -> tuple[dict[str, Any], str]:
    """The metrics of the last step in a record, and a message about an invalid line after it."""
    metrics: dict[str, Any] = {}
    damage = ""
    for line in reversed(last_lines(path, PART)):
        row = parse_row(line)
        # Rows of a step are merged: on resume, an evaluation has a separate row.
        if row and metrics and row["step"] != metrics["step"]:
            break
        metrics = (row or {}) | metrics
        damage = damage_of(path, line) if row is None and line.endswith(b"\n") else damage
    return metrics, damage
