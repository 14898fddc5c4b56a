"""What a person sees during a run: phases with bars, then the training steps.

A display subscribes to the run's events: live (`terminal.py`) or plain lines (`plain.py`). If the terminal or pipe
closes, the run continues without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Protocol, TextIO

from simpletuner.reporting.events import Event, EventStream


class Display(Protocol):
    """Shows events to people."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None:
        """Restore the terminal. May be called more than once."""


@contextmanager
def shown_events(stream: TextIO | None = None) -> Iterator[EventStream]:
    """A stream of events with a display, which restores the terminal at the end, also after an exception.

    Args:
        stream: where to write; None means standard output.
    """
    with closing(make_display(stream)) as display:
        yield EventStream(display)


def make_display(stream: TextIO | None = None) -> Display:
    """The live display on a terminal, plain lines elsewhere."""
    stream = stream or sys.stdout
    lasting = LastingStream(stream)
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        # Importing rich takes a tenth of a second, which `--dry-run | less` need not spend.
        from simpletuner.reporting.terminal import LiveDisplay

        return LiveDisplay(lasting)
    from simpletuner.reporting.plain import PlainDisplay

    return PlainDisplay(lasting)


class LastingStream:
    """A text stream that discards output once its reader is gone, where others raise."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        with self._lost_silently():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._lost_silently():
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @contextmanager
    def _lost_silently(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            silence(self._stream)


def silence(stream: TextIO) -> None:
    """Redirect a dead stream to /dev/null: flushing its buffer at exit would raise."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):  # a stream in memory has no file number
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
