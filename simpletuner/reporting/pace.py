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

# Factors of the usual pace. The lower limit ends an episode, so that a pace near the upper limit is
# reported once.
SLOWER = 1.5
RECOVERED = 1.2
RECENT = 5  # steps whose median is compared; a single slow step does not count
ENOUGH = 20  # steps of a shape needed for its usual pace
HISTORY = 1000  # steps of a shape, whose median is the usual pace
# A gap between two steps of at least this many seconds and steps was a checkpoint, previews or an
# evaluation.
LEAST_PAUSE = 0.1
PAUSE = 0.5
AFTER_A_PAUSE = 2  # steps ignored after a pause

WHOLE = "whole"
REASONS = {
    COMPUTE: "compute; another program uses the device, or it is throttled by heat or power",
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
        waits = {WEIGHTS: report.weights_seconds or 0.0, DATA: report.data_seconds}
        parts = {COMPUTE: max(0.0, report.seconds - sum(waits.values())), **waits}
        history = self._histories[kind]
        history.append({WHOLE: sum(parts.values()), **parts})

        def pace(part: str, steps: int = RECENT) -> float:
            """The median of the latest steps, which is robust to single slow ones."""
            return median(step[part] for step in islice(reversed(history), steps))

        recent = pace(WHOLE)
        usual = pace(WHOLE, HISTORY)
        slowdown = recent / usual if usual and len(history) >= ENOUGH else 1.0
        if slowdown < RECOVERED:
            self._slow.discard(kind)
        if slowdown < SLOWER:
            return None
        # One notice per episode, however many shapes slow down.
        begins = not self._slow
        self._slow.add(kind)
        reason = REASONS[max(parts, key=lambda part: pace(part) - pace(part, HISTORY))]
        slower = (
            f"{slowdown:.1f} times the usual {pace_text(usual)}, over the last {RECENT} steps of "
            "this size"
        )
        return (
            f"Steps became slower: {pace_text(recent)}, {slower}. Likely cause: {reason}."
            if begins
            else None
        )

    def _follows_a_pause(self, seconds: float) -> bool:
        """Whether other work ran just before; a cold allocator and moved weights then slow down a
        step or two.
        """
        ended = self._ended
        self._ended = self._now()
        if ended is not None and self._ended - ended - seconds > max(LEAST_PAUSE, PAUSE * seconds):
            self._skip = AFTER_A_PAUSE
        skipped = self._skip > 0
        self._skip = max(0, self._skip - 1)
        return skipped
