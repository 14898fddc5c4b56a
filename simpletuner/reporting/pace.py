"""Detects slow steps, and names the likely reason."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from itertools import islice
from statistics import median

from simpletuner.reporting import events
from simpletuner.reporting.metrics import COMPUTE, DATA, WEIGHTS
from simpletuner.reporting.wording import pace_text

# Multiples of the usual duration of a step. An episode of slow steps begins at the first and ends
# below the second, so that a pace near the first is reported once.
SLOWER = 1.5
RECOVERED = 1.2
RECENT = 5  # steps whose median is compared; a single slow step does not count
ENOUGH = 20  # steps of a shape needed for its usual pace
HISTORY = 1000  # steps of a shape, whose median is the usual pace
# A gap between two steps is a checkpoint, previews or an evaluation if it exceeds both limits.
PAUSE_SECONDS = 0.1
PAUSE_STEPS = 0.5  # as a share of the step
AFTER_A_PAUSE = 2  # steps ignored after a pause

TOTAL = "total"
REASONS = {
    COMPUTE: "another program uses the processor, or it is throttled by heat or power",
    WEIGHTS: (
        "waiting for streamed weights; another program uses host memory or the bus to the device"
    ),
    DATA: "waiting for data; the disk with the caches or the CPU is busy",
}


class SlowSteps:
    """Detects when steps become slower, and names the likely reason.

    Only steps of the same shape are compared, since a larger bucket is slower by design.

    Args:
        now: the clock, read once after each step; tests pass their own.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._histories = defaultdict[Hashable, deque[dict[str, float]]](
            lambda: deque(maxlen=HISTORY)
        )
        self._slow: set[Hashable] = set()
        self._ended: float | None = None
        self._skip = 0

    def add(self, report: events.StepReport) -> str | None:
        """Add a step; returns a notice when an episode of slow steps begins."""
        if self._follows_a_pause(report.seconds):
            return None
        # Techniques add passes in some steps, which are slower by design, like larger shapes.
        kind = report.shapes, report.passes
        history = self._histories[kind]
        history.append(_parts_of(report))
        recent = _pace(history, TOTAL, RECENT)
        usual = _pace(history, TOTAL, HISTORY)
        slowdown = 1.0
        if usual and len(history) >= ENOUGH:
            slowdown = recent / usual
        if slowdown < RECOVERED:
            self._slow.discard(kind)
        if slowdown < SLOWER:
            return None
        # One notice per episode, however many shapes slow down.
        begins = not self._slow
        self._slow.add(kind)
        if not begins:
            return None
        comparison = (
            f"{slowdown:.1f} times the usual {pace_text(usual)}, over the last {RECENT} steps of "
            "this size"
        )
        reason = REASONS[_slowed_part(history)]
        return f"Steps became slower: {pace_text(recent)}, {comparison}. Likely cause: {reason}."

    def _follows_a_pause(self, seconds: float) -> bool:
        """Whether other work ran just before a step of this duration.

        A cold allocator and moved weights then slow down a step or two.
        """
        previous = self._ended
        self._ended = self._now()
        if previous is not None:
            gap = self._ended - previous - seconds
            if gap > max(PAUSE_SECONDS, PAUSE_STEPS * seconds):
                self._skip = AFTER_A_PAUSE
        if self._skip == 0:
            return False
        self._skip -= 1
        return True


def _parts_of(report: events.StepReport) -> dict[str, float]:
    """The seconds of a step by what they were spent on, and their total."""
    weights = report.weights_seconds or 0.0
    data = report.data_seconds
    # Waits are measured separately and may be slightly longer than the step.
    compute = max(0.0, report.seconds - (weights + data))
    return {TOTAL: compute + weights + data, COMPUTE: compute, WEIGHTS: weights, DATA: data}


def _pace(history: deque[dict[str, float]], part: str, steps: int) -> float:
    """The median seconds of the latest steps, which is robust to single slow ones."""
    return median(step[part] for step in islice(reversed(history), steps))


def _slowed_part(history: deque[dict[str, float]]) -> str:
    """The part of a step that has slowed down most, in seconds."""

    def slowdown(part: str) -> float:
        return _pace(history, part, RECENT) - _pace(history, part, HISTORY)

    return max(REASONS, key=slowdown)
