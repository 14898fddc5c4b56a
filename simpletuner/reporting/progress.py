"""What a person sees during a run: phases with bars, then the training steps.

A display subscribes to the run's events: plain lines, here, or a live display (`terminal.py`). If the terminal or pipe
closes, the run continues without it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Protocol, TextIO

from simpletuner.reporting.events import (
    ENDED,
    SHOWN,
    Event,
    EventStream,
    PhaseAdvanced,
    PhaseEnded,
    PhaseStarted,
    StateChanged,
    StepReport,
)
from simpletuner.reporting.pace import Pace, clock, ending, line_of, pace_text, reached, size_text

# A log should stay readable: about this many lines per run, and at least one in this many seconds.
TRAINING_LINES = 30
LONGEST_SILENCE = 60.0
# A phase prints a line per tenth, and at least one in LONGEST_PAUSE, but never within SHORTEST_PAUSE. Seconds.
SHORTEST_PAUSE = 2.0
LONGEST_PAUSE = 15.0


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
    if is_screen(stream):
        # Importing rich takes a tenth of a second, which `--dry-run | less` need not spend.
        from simpletuner.reporting.terminal import LiveDisplay

        return LiveDisplay(lasting)
    return PlainDisplay(lasting)


def is_screen(stream: TextIO) -> bool:
    """Whether a stream is a terminal that moves its cursor and shows colours."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def in_red(text: str, stream: TextIO) -> str:
    """The text in red where the stream shows colours and NO_COLOR does not forbid them (https://no-color.org)."""
    return f"\x1b[31m{text}\x1b[0m" if is_screen(stream) and not os.environ.get("NO_COLOR") else text


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
    with suppress(OSError):  # a stream in memory has no file number
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class PlainDisplay:
    """Throttled lines on a stream.

    Args:
        stream: written and flushed line by line.
        now: the clock; tests pass their own.
    """

    def __init__(self, stream: TextIO | LastingStream, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._pace: Pace | None = None
        self._every = 1
        self._printed_at = 0.0
        self._phases: dict[PhaseStarted, _PhaseLines] = {}

    def __call__(self, event: Event) -> None:
        if self._pace is not None:
            self._pace.note(event)
        match event:
            case PhaseStarted():
                self._phases[event] = _PhaseLines(event, self._now())
            case PhaseAdvanced():
                self._say(self._phases[event.phase].due(event, self._now()))
            case PhaseEnded():
                del self._phases[event.phase]
                self._say(f"{event.phase.title}: {ending(event)}")
            case StepReport():
                if self._pace is not None:
                    self._step(self._pace, event)
            case StateChanged():
                self._change(event)
            case _:
                self._say(line_of(event))

    def close(self) -> None:
        if self._pace is not None:
            self._say(self._pace.summary())
            self._pace = None

    def _change(self, event: StateChanged) -> None:
        if event.state == "running":
            self._pace = Pace.of(event)
            self._every = max(1, -(-(event.total_steps - event.step) // TRAINING_LINES))
            self._printed_at = self._now()
            note = f", continuing after step {event.step}" if event.step else ""
            self._say(f"Training: {event.total_steps} steps{note}")
        elif event.state in ENDED:
            self.close()
        if event.state in SHOWN:
            self._say(event.message)

    def _step(self, pace: Pace, event: StepReport) -> None:
        due = event.step % self._every == 0 or event.step in (pace.start_step + 1, pace.total_steps)
        if due or self._now() - self._printed_at >= LONGEST_SILENCE:
            self._printed_at = self._now()
            self._say(step_line(pace, event))

    def _say(self, text: str) -> None:
        if text:
            self._stream.write(f"{text}\n")
            self._stream.flush()


def step_line(pace: Pace, report: StepReport) -> str:
    """`step 40/300  epoch 2  loss 0.2134  lr 1.0e-04  1.92 s/step  8:19 left  11.4 GiB  compute 99 %, …`"""
    epochs = f"/{report.epochs}" if report.epochs else ""
    parts = [
        f"step {report.step}/{pace.total_steps}",
        f"epoch {report.epoch}{epochs}",
        f"loss {pace.loss:.4f}",
        f"lr {report.learning_rate:.2e}",
        pace_text(pace.seconds_per_step),
        f"{clock(pace.remaining_seconds)} left",
    ]
    if report.memory_bytes is not None:
        parts.append(size_text(report.memory_bytes))
    parts.append(pace.speed)
    return "  ".join(parts)


class _PhaseLines:
    """Decides when the progress of a phase is worth a line."""

    def __init__(self, phase: PhaseStarted, now: float) -> None:
        self._phase, self._printed_at, self._printed_tenth = phase, now, 0

    def due(self, event: PhaseAdvanced, now: float) -> str:
        """The line that is due now, or an empty one."""
        total, pause = self._phase.total, now - self._printed_at
        tenth = event.done * 10 // total if total else self._printed_tenth
        if pause < SHORTEST_PAUSE or (tenth == self._printed_tenth and pause < LONGEST_PAUSE):
            return ""
        self._printed_at, self._printed_tenth = now, tenth
        return f"{self._phase.title}: {reached(self._phase, event.done)}" + (f" ({event.note})" if event.note else "")
