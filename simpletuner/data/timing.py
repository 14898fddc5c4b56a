"""When the frames of a clip are shown.

Trained frame k shows what the source shows at k / rate seconds, whatever its own rate is, constant or not. Times count
from the first frame that is shown.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# Containers round times to milliseconds or to 1/600 s, so a frame may seem to begin this much too late.
TOLERANCE = 0.002
# What may be missing at the end of a clip before it counts as cut off; headers are not that exact.
MISSING_SECONDS = 0.25


@dataclass(frozen=True)
class ClipFacts:
    """What is known of a clip without decoding it.

    Attributes:
        width, height: pixels as shown: upright, with square pixels.
        seconds: from the first frame to the end of the last one.
        source_rate: its own frames per second, on average; 0 when it has one frame.
    """

    width: int
    height: int
    seconds: float
    source_rate: float

    def frames_at(self, rate: float) -> int:
        """How many frames it gives at a rate; at least one."""
        return max(1, math.ceil((self.seconds - TOLERANCE) * rate))


def moments_of(frames: int, rate: float) -> list[float]:
    """The times in seconds at which the first frames are taken."""
    return [index / rate for index in range(frames)]


def shown_at(times: Sequence[float], moments: Sequence[float]) -> list[int]:
    """Which of the frames that begin at `times` (increasing) is shown at each moment."""
    return [max(0, bisect_right(times, moment + TOLERANCE) - 1) for moment in moments]
