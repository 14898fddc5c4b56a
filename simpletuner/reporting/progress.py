"""What a person sees while a run goes: phases with bars, then the training steps.

Three displays share one interface: live (`terminal.py`), plain lines (`plain.py`) and silence. None of them changes
anything in training; the record of a run is `training_metrics.jsonl`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TextIO


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of one finished optimizer step.

    Attributes:
        step: counted from 1, over all sessions of the run.
        epoch: counted from 1.
        seconds: wall time of the step, including the wait for data.
        data_wait_seconds: part of `seconds` in which the next batch was not ready.
        weights_wait_seconds: part of `seconds` in which streamed weights were not there; None when none are streamed.
        mfu: model FLOP utilisation, in units of the device's measured matmul rate; None where it is not known.
        memory_bytes: peak memory of the device, None where it is not measured.
        epochs: planned epochs, None when steps decide.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    seconds: float
    data_wait_seconds: float = 0.0
    memory_bytes: int | None = None
    epochs: int | None = None
    weights_wait_seconds: float | None = None
    mfu: float | None = None


class Phase(Protocol):
    """A piece of work of known or unknown size, under way."""

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more units are done; the note says what is being worked on (a file name)."""


class Progress(Protocol):
    """A display. Use it as a context manager, so that an exception leaves the terminal in order."""

    def phase(self, title: str, total: int | None = None, unit: str = "") -> AbstractContextManager[Phase]:
        """Open a phase; it is closed, and its duration told, at the end of the `with` block."""

    def start_training(self, total_steps: int, start_step: int = 0) -> None:
        """From now on steps come in. `start_step` is the step that a resumed run continues after."""

    def step(self, report: StepNumbers) -> None:
        """One optimizer step is done."""

    def say(self, text: str) -> None:
        """Print lines above the display."""

    def finish(self) -> None:
        """Close the display and, after training, print a summary. May be called more than once."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_progress(stream: TextIO | None = None) -> Progress:
    """The live display on a terminal, plain lines anywhere else.

    Args:
        stream: where to write; None is standard output.
    """
    stream = stream or sys.stdout
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        # rich takes a tenth of a second to import, which `--dry-run | less` need not spend.
        from simpletuner.reporting.terminal import LiveProgress

        return LiveProgress(stream)
    from simpletuner.reporting.plain import PlainProgress

    return PlainProgress(stream)


class SilentProgress:
    """No display: for tests, and for every process but the first."""

    @contextmanager
    def phase(self, title: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        yield self

    def advance(self, count: int = 1, note: str = "") -> None:
        """Nothing to show."""

    def start_training(self, total_steps: int, start_step: int = 0) -> None:
        """Nothing to show."""

    def step(self, report: StepNumbers) -> None:
        """Nothing to show."""

    def say(self, text: str) -> None:
        """Nothing to show."""

    def finish(self) -> None:
        """Nothing to show."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None
