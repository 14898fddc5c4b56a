"""Clips through decord: fast, but unmaintained, not available everywhere, and wrong about some files. It reads
untagged colours as BT.601.

The one place that knows it. `read` refuses whatever decord may be wrong about, and `clips` asks PyAV then.
"""

from __future__ import annotations

import functools
import importlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simpletuner.data.clips import MISSING_SECONDS, shown_at

# Frames that are decoded at once; 200 of them at 1280x720 would be half a gigabyte.
SLICE = 8


class NotForDecordError(Exception):
    """decord is not here, cannot read a clip, or would read it wrongly."""


def read(path: Path, moments: Sequence[float]) -> Iterator[NDArray[np.uint8]]:
    """The frames shown at increasing moments, upright RGB, `H W 3`.

    Raises:
        NotForDecordError: ask another reader for the frames that are still to come.
    """
    decord = _decord()
    if decord is None:
        raise NotForDecordError("decord is not installed")
    try:
        # One reader per call: a reader that threads share ends the process.
        reader = decord.VideoReader(str(path), num_threads=1)
        indices = deque(shown_at(_times(reader, moments[-1]), moments))
        # Every frame is taken: where frames are left out decord seeks, and after that some codecs give others.
        for start in range(0, indices[-1] + 1, SLICE):
            numbers = range(start, min(start + SLICE, indices[-1] + 1))
            for number, frame in zip(numbers, reader.get_batch(numbers).asnumpy(), strict=True):
                while indices and indices[0] == number:
                    indices.popleft()
                    yield frame
    except (decord.base.DECORDError, RuntimeError, IndexError, ValueError, OSError) as error:
        raise NotForDecordError(str(error)) from error


def _times(reader: Any, last: float) -> list[float]:
    """When each frame begins, in seconds after the first; the clip must reach the last moment.

    Raises:
        NotForDecordError: they cannot be right. Edit lists begin below 0, AVI and MPEG have none that grow.
    """
    spans = reader.get_frame_timestamp(range(len(reader)))
    times = [float(begin) for begin, _ in spans]
    grows = all(earlier < later for earlier, later in pairwise(times))
    if len(times) != len(reader) or not times or times[0] < 0 or not grows:
        raise NotForDecordError("its times are not those of the clip")
    if last > spans[-1][1] - times[0] + MISSING_SECONDS:
        raise NotForDecordError("it ends too early")
    return [time - times[0] for time in times]


@functools.cache
def _decord() -> Any:
    """The module, or None where it is not installed or its libraries do not load."""
    try:
        decord = importlib.import_module("decord")
    except (ImportError, OSError, RuntimeError):
        return None
    decord.logging.set_level(decord.logging.QUIET)
    return decord
