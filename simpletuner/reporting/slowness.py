"""Notices when steps become slower, and names the likely reason.

Only steps of the same bucket shape are compared, since a larger bucket is slower by design.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from statistics import median

from simpletuner.reporting.events import StepReport
from simpletuner.reporting.metrics import COMPUTE, DATA, WEIGHTS
from simpletuner.reporting.pace import pace_text

# Factors of the usual pace. The lower limit ends an episode, so that a pace around the upper one is reported once.
SLOWER = 1.5
RECOVERED = 1.2
RECENT = 5  # steps whose median is compared; one slow step alone is no slowdown
ENOUGH = 20  # steps of a shape before its usual pace is known
# A gap between two steps of at least this many seconds and this many steps was a checkpoint, previews or an evaluation.
LEAST_PAUSE, PAUSE = 0.1, 0.5
AFTER_A_PAUSE = 2  # steps that are ignored after it

REASONS = {
    COMPUTE: "computing takes longer, so another program may use the device, or heat or power slow its clock",
    WEIGHTS: "weights arrive later, so another program may use the host's memory or its bus to the device",
    DATA: "data arrives later, so the disk with the caches or the processor may be busy",
}


@dataclass
class _ShapeHistory:
    """Steps of one shape: all durations sorted, for medians, and the latest ones in order of time."""

    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=lambda: {COMPUTE: [], WEIGHTS: [], DATA: []})
    recent: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, parts: dict[str, float]) -> None:
        insort(self.seconds, sum(parts.values()))
        for name, value in parts.items():
            insort(self.parts[name], value)
        self.recent.append(parts)

    def slowdown(self) -> float:
        """The median of the recent steps relative to the median of all; 1 until enough are known."""
        usual = sorted_median(self.seconds)
        if len(self.seconds) < ENOUGH or not usual:
            return 1.0
        return median(sum(parts.values()) for parts in self.recent) / usual

    def growth(self) -> dict[str, float]:
        """By how many seconds each part of a step grew."""
        return {
            name: median(p[name] for p in self.recent) - sorted_median(values) for name, values in self.parts.items()
        }


class SlowSteps:
    """Watches the duration of the steps.

    Args:
        now: the clock, read once after each step; tests pass their own.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._histories: dict[Hashable, _ShapeHistory] = {}
        self._slow: set[Hashable] = set()
        self._ended: float | None = None
        self._skip = 0

    def add(self, report: StepReport) -> str | None:
        """Add a step; returns a notice when an episode of slow steps begins."""
        if self._follows_a_pause(report.seconds):
            return None
        # Techniques run further passes in some steps only: those are slower by design, like larger shapes.
        kind = report.shapes, report.passes
        history = self._histories.setdefault(kind, _ShapeHistory())
        waits = {WEIGHTS: report.weights_seconds or 0.0, DATA: report.data_seconds}
        history.add({COMPUTE: max(0.0, report.seconds - sum(waits.values())), **waits})
        slowdown = history.slowdown()
        if slowdown < RECOVERED:
            self._slow.discard(kind)
        if slowdown < SLOWER:
            return None
        begins = not self._slow
        self._slow.add(kind)
        return self._notice(history) if begins else None

    def _follows_a_pause(self, seconds: float) -> bool:
        """Whether other work ran just before; its after-effects (cold allocator, moved weights) slow a step or two."""
        ended, self._ended = self._ended, self._now()
        if ended is not None and self._ended - ended - seconds > max(LEAST_PAUSE, PAUSE * seconds):
            self._skip = AFTER_A_PAUSE
        skipped = self._skip > 0
        self._skip = max(0, self._skip - 1)
        return skipped

    def _notice(self, history: _ShapeHistory) -> str:
        recent, usual = median(sum(parts.values()) for parts in history.recent), sorted_median(history.seconds)
        growth = history.growth()
        reason = REASONS[max(growth, key=lambda name: growth[name])]
        return (
            f"Steps became slower: the last {RECENT} of this shape took {pace_text(recent)}, "
            f"{recent / usual:.1f} times as long as usual ({pace_text(usual)}). Likely reason: {reason}."
        )


def sorted_median(ordered: Sequence[float]) -> float:
    """The upper median of sorted values, without sorting them again as `statistics` would."""
    return ordered[len(ordered) // 2] if ordered else 0.0
