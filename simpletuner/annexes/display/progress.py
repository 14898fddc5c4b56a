"""The progress of a run as plain lines: phases, then training steps.

A display subscribes to the run's events. This module prints plain lines; `terminal.py` draws a live
display. The run continues if the terminal or pipe closes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import TextIO

from simpletuner.annexes.figures import Pace, ending, line_of, reached
from simpletuner.errors import counted
from simpletuner.reporting import events
from simpletuner.reporting.screen import is_screen
from simpletuner.reporting.step_figures import FIGURES
from simpletuner.reporting.wording import clock_text
from simpletuner.rounding import ceil_div

TRAINING_LINES = 30  # at most about this many lines of steps, to keep logs readable
LONGEST_SILENCE = 60.0  # seconds after which a step has a line in any case
PHASE_PAUSE = 10.0  # seconds between the lines of a phase
LEADING = ("loss", "lr", "pace", "epoch")  # figures that displays show first


class Display:
    """Base class of displays, which show events.

    Attributes:
        pace: averages over the steps; None outside training.
    """

    pace: Pace | None = None

    def __call__(self, event: events.Event) -> None:
        if self.pace is not None:
            self.pace.note(event)
        if not isinstance(event, events.StateChanged):
            self.show(event)
            return
        if event.state == "running":
            self.pace = Pace.of(event)
            self.begin(self.pace)
        elif event.state in events.ENDED:
            self.close()
        if event.state in events.SHOWN:
            self.print_lines(event.message)

    def show(self, event: events.Event) -> None:
        """Show an event that does not change the state of the run."""
        raise NotImplementedError

    def begin(self, pace: Pace) -> None:
        """Show that training begins."""
        raise NotImplementedError

    def print_lines(self, text: str) -> None:
        """Print lines, unless they are empty."""
        raise NotImplementedError

    def close(self) -> None:
        """Restore the terminal and print a summary of training. May be called more than once."""
        if self.pace is not None:
            self.print_lines(self.pace.summary())
            self.pace = None


@contextmanager
def shown_events(stream: TextIO | None = None) -> Iterator[events.EventStream]:
    """A stream of events with a display.

    The display restores the terminal at the end, also after an exception.

    Args:
        stream: output stream; None means stdout.
    """
    with closing(make_display(stream)) as display:
        event_stream = events.EventStream()
        event_stream.subscribe("The display", display)
        yield event_stream


def make_display(stream: TextIO | None = None) -> Display:
    """The live display on a terminal, plain lines elsewhere."""
    stream = stream or sys.stdout
    lasting = LastingStream(stream)
    if is_screen(stream):
        # Imported only here, since importing rich takes a tenth of a second.
        from simpletuner.annexes.display.terminal import LiveDisplay

        return LiveDisplay(lasting)
    return PlainDisplay(lasting)


class LastingStream:
    """A text stream that discards output once its reader has exited, without an error."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding  # rich reads it to decide whether it may draw boxes

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
            # Redirected to /dev/null: flushing the buffer of a closed stream at exit would raise.
            null = os.open(os.devnull, os.O_WRONLY)
            with suppress(OSError):  # an in-memory stream has no file descriptor
                os.dup2(null, self._stream.fileno())
            os.close(null)


class PlainDisplay(Display):
    """Prints throttled lines to a stream.

    Args:
        stream: written and flushed line by line.
        now: the clock; tests replace it.
    """

    def __init__(
        self, stream: TextIO | LastingStream, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._now = now
        self._every = 1
        self._printed_at = 0.0
        self._printed: dict[events.PhaseStarted, float] = {}  # time of a phase's last line

    def show(self, event: events.Event) -> None:
        match event:
            case events.PhaseStarted():
                self._printed[event] = self._now()
            case events.PhaseAdvanced():
                self._advance(event)
            case events.PhaseEnded():
                del self._printed[event.phase]
                self.print_lines(f"{event.phase.title}: {ending(event)}")
            case events.StepReport():
                if self.pace is not None:
                    self._step(self.pace, event)
            case _:
                self.print_lines(line_of(event))

    def begin(self, pace: Pace) -> None:
        # Rounded up, for at most TRAINING_LINES.
        self._every = max(1, ceil_div(pace.total_steps - pace.step, TRAINING_LINES))
        self._printed_at = self._now()
        note = f", continuing after step {pace.step}" if pace.step else ""
        self.print_lines(f"Training: {counted(pace.total_steps, 'step')}{note}")

    def _advance(self, event: events.PhaseAdvanced) -> None:
        """Print the progress of a phase if a line is due."""
        now = self._now()
        if now - self._printed[event.phase] < PHASE_PAUSE:
            return
        self._printed[event.phase] = now
        note = f" ({event.note})" if event.note else ""
        self.print_lines(f"{event.phase.title}: {reached(event.phase, event.done)}{note}")

    def _step(self, pace: Pace, event: events.StepReport) -> None:
        """Print the line of a step if one is due."""
        is_first_or_last = event.step in (pace.start_step + 1, pace.total_steps)
        is_due = is_first_or_last or event.step % self._every == 0
        if is_due or self._now() - self._printed_at >= LONGEST_SILENCE:
            self._printed_at = self._now()
            self.print_lines(step_line(pace, event))

    def print_lines(self, text: str) -> None:
        if text:
            self._stream.write(f"{text}\n")
            self._stream.flush()


def key_figures(pace: Pace, report: events.StepReport) -> dict[str, str]:
    """The figures that displays show of the last step, by name; unknown ones are left out."""
    values = {**report.metrics, **pace.live}
    texts = {"epoch": f"{report.epoch}/{report.epochs}" if report.epochs else str(report.epoch)}
    for figure in FIGURES:
        value = values.get(figure.live_name)
        if figure.short and value is not None:
            texts[figure.short] = figure.in_terminal(value)
    leading = {name: texts.pop(name) for name in LEADING if name in texts}
    return {**leading, **texts}


def step_line(pace: Pace, report: events.StepReport) -> str:
    """`step 40/300  epoch 2  loss 0.2134  lr 1.0e-04  1.92 s/step  8:19 left  11.4 GB  …`"""
    figures = key_figures(pace, report)
    parts = [f"step {report.step}/{pace.total_steps}"]
    parts += [f"{name} {figures.pop(name)}" for name in ("epoch", "loss", "lr")]
    parts += [figures.pop("pace"), f"{clock_text(pace.remaining_seconds)} left"]
    if "memory" in figures:
        parts.append(figures.pop("memory"))  # its unit shows what it is
    parts += [f"{name} {text}" for name, text in figures.items()]
    if pace.speed:
        parts.append(pace.speed)
    return "  ".join(parts)
