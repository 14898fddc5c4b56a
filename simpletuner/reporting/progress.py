"""What a person sees while a run goes: phases with bars, then the training steps.

A display is a subscriber of the run's events: live (`terminal.py`) or plain lines (`plain.py`). It may be lost on the
way, with a closed terminal or pipe, and the run goes on without it.
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
        """Leave the terminal in order. May be called more than once."""


@contextmanager
def shown_events(stream: TextIO | None = None) -> Iterator[EventStream]:
    """A stream of events that a person sees; an exception leaves the terminal in order, too.

    Args:
        stream: where to write; None is standard output.
    """
    with closing(make_display(stream)) as display:
        yield EventStream(display)


def make_display(stream: TextIO | None = None) -> Display:
    """The live display on a terminal, plain lines anywhere else."""
    stream = stream or sys.stdout
    lasting = LastingStream(stream)
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        # rich takes a tenth of a second to import, which `--dry-run | less` need not spend.
        from simpletuner.reporting.terminal import LiveDisplay

        return LiveDisplay(lasting)
    from simpletuner.reporting.plain import PlainDisplay

    return PlainDisplay(lasting)


class LastingStream:
    """A text stream that goes silent when nobody can read it any more, where others raise."""

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
    """Send what a dead stream still holds, and gets later, nowhere; Python would complain about it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):  # a stream of a test has no number
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
