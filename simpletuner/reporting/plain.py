"""Progress as lines of text, for files, pipes and terminals that cannot move the cursor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from simpletuner.reporting.pace import Pace, amount, clock, pace_text, size_text
from simpletuner.reporting.progress import Phase, StepNumbers

# A log should stay readable: about this many lines a run, and a sign of life at least this often.
TRAINING_LINES = 30
LONGEST_SILENCE = 60.0
# A phase tells every tenth, but not more often than this; a slow one tells every now and then.
SHORTEST_PAUSE = 2.0
LONGEST_PAUSE = 15.0


class PlainProgress:
    """Throttled lines on a stream.

    Args:
        stream: written and flushed line by line.
        now: the clock; tests bring their own.
    """

    def __init__(self, stream: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._now = now
        self._pace: Pace | None = None
        self._every = 1
        self._told_at = 0.0

    @contextmanager
    def phase(self, title: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        phase = _PlainPhase(self, title, total, unit, self._now)
        try:
            yield phase
        except BaseException:
            self.say(f"{title}: stopped at {phase.state()}")
            raise
        self.say(f"{title}: {amount(phase.done, unit)} in {clock(self._now() - phase.started)}")

    def start_training(self, total_steps: int, start_step: int = 0) -> None:
        self._pace = Pace(total_steps, start_step)
        self._every = max(1, -(-(total_steps - start_step) // TRAINING_LINES))
        self._told_at = self._now()
        note = f", continuing after step {start_step}" if start_step else ""
        self.say(f"Training: {total_steps} steps{note}")

    def step(self, report: StepNumbers) -> None:
        if self._pace is None:
            raise RuntimeError("start_training() comes before the first step()")
        self._pace.add(report)
        due = report.step % self._every == 0 or report.step in (self._pace.start_step + 1, self._pace.total_steps)
        if due or self._now() - self._told_at >= LONGEST_SILENCE:
            self._told_at = self._now()
            self.say(step_line(self._pace, report))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def finish(self) -> None:
        if self._pace is not None:
            self.say(self._pace.summary())
            self._pace = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()


def step_line(pace: Pace, report: StepNumbers) -> str:
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


class _PlainPhase:
    def __init__(
        self, progress: PlainProgress, title: str, total: int | None, unit: str, now: Callable[[], float]
    ) -> None:
        self._progress, self._title, self._total, self._unit, self._now = progress, title, total, unit, now
        self.done = 0
        self.started = self._told_at = now()
        self._told_tenth = 0

    def advance(self, count: int = 1, note: str = "") -> None:
        self.done += count
        tenth = self.done * 10 // self._total if self._total else self._told_tenth
        pause = self._now() - self._told_at
        if pause < SHORTEST_PAUSE or (tenth == self._told_tenth and pause < LONGEST_PAUSE):
            return
        self._told_at, self._told_tenth = self._now(), tenth
        self._progress.say(f"{self._title}: {self.state()}" + (f" ({note})" if note else ""))

    def state(self) -> str:
        if not self._total:
            return amount(self.done, self._unit)
        return f"{self.done:,}/{amount(self._total, self._unit)} ({self.done * 100 // self._total} %)"
