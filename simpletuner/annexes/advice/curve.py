"""Whether the loss on held-out files rises, falls or stays level, beyond its noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import median
from typing import Literal

from simpletuner.annexes.figures import Point

Trend = Literal["rising", "falling", "level", "unclear"]

# Fewer points show no trend: their noise cannot be estimated.
FEWEST_POINTS = 4
# Between two steps, the losses of different files and noise levels change by different amounts:
# their standard deviation is up to this share of the loss (0.9 to 2.7 % within a run of the demo's
# model). Their mean is known the better the more of them are measured, and two standard errors are
# clear.
PAIRED_SPREAD = 0.025
STANDARD_ERRORS = 2
USUAL_PASSES = 28  # if the number of measurements is unknown: one file at the default noise levels
# A change is clear beyond so many standard deviations of the curve's noise. On curves of pure
# noise, about 3 in 100 still seem to rise.
CLEAR = 4
# A rise or fall has at least this share of its pairs of points in the same order.
STEADY = 0.8
# So many points are in order by chance once in 120 times.
ORDERED = 5
# Converts the median absolute deviation of a normal distribution into its standard deviation.
NORMAL = 1.4826
# Variance of a point's deviation from the mean of its neighbours, in variances of a point.
BEND_VARIANCE = 1.5


@dataclass(frozen=True)
class LossCurve:
    """The losses on held-out files, oldest first.

    Attributes:
        points: (step, loss), at least one.
        passes: measured losses in a point: files times noise levels; 0 if unknown.
    """

    points: Sequence[Point]
    passes: int = 0

    @property
    def best(self) -> int:
        """Index of the lowest loss; the first of equal ones."""
        losses = self.losses
        return losses.index(min(losses))

    @property
    def losses(self) -> list[float]:
        return [loss for _, loss in self.points]

    @property
    def precision(self) -> float:
        """The smallest change that so few files and noise levels can show."""
        error = PAIRED_SPREAD / sqrt(self.passes or USUAL_PASSES)
        return STANDARD_ERRORS * error * min(self.losses)

    @property
    def noise(self) -> float:
        """Standard deviation of a point around the curve, from its bends.

        A curve that is steep at first bends without noise, which makes this estimate too large, and
        the verdict cautious.
        """
        losses = self.losses
        bends = []
        for index in range(1, len(losses) - 1):
            # The lowest point was chosen for being low.
            if index != self.best:
                bends.append(abs(losses[index] - (losses[index - 1] + losses[index + 1]) / 2))
        return median(bends) * NORMAL / sqrt(BEND_VARIANCE) if bends else 0.0

    @property
    def margin(self) -> float:
        """A smaller change may be noise."""
        return max(self.precision, CLEAR * self.noise)

    @property
    def third(self) -> int:
        """Index of the point at which the last third begins; at least two points follow it."""
        count = max(2, round(len(self.points) / 3))
        return len(self.points) - 1 - count

    @property
    def trend(self) -> Trend:
        """What the loss does at the end of the curve."""
        if len(self.points) < FEWEST_POINTS:
            return "unclear"
        if self._rises():
            return "rising"
        if self._falls():
            return "falling"
        return "level" if self._is_level() else "unclear"

    def _rises(self) -> bool:
        since = self.losses[self.best :]
        # Of one higher point, nobody knows whether it begins a rise.
        if len(since) < 3:
            return False
        return min(since[-2:]) - since[0] > self.margin and share_of_rises(since) >= STEADY

    def _falls(self) -> bool:
        losses = self.losses
        last = losses[self.third :]
        is_lowest_at_end = self.best == len(losses) - 1
        if not is_lowest_at_end or 1 - share_of_rises(last) < STEADY:
            return False
        # Noise does not put so many points in order.
        has_only_fallen = len(losses) >= ORDERED and share_of_rises(losses) == 0
        margin = self.precision if has_only_fallen else self.margin
        return last[0] - last[-1] > margin

    def _is_level(self) -> bool:
        last = self.losses[self.third :]
        return max(last) - min(self.losses) <= self.precision

    @property
    def level_since(self) -> int:
        """The first step after which the loss stays as low as it gets, within its precision."""
        limit = min(self.losses) + self.precision
        step = self.points[-1][0]
        for earlier, loss in reversed(self.points):
            if loss > limit:
                break
            step = earlier
        return step


def share_of_rises(values: Sequence[float]) -> float:
    """The share of pairs of values of which the later one is higher."""
    pairs = list(combinations(values, 2))
    rises = [earlier < later for earlier, later in pairs]
    return rises.count(True) / len(pairs)
