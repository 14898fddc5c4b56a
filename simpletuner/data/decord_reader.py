"""Read clips with decord: fast, but unmaintained, not available everywhere, and wrong about some files. It reads
untagged colours as BT.601.

The only module that knows it. `read` refuses whatever decord may get wrong, and `clips` then falls back to PyAV.
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

# Frames decoded at once; 200 of them at 1280x720 would take half a gigabyte.
SLICE = 8


class NotForDecordError(Exception):
    """decord is not installed, cannot read a clip, or would read it wrongly."""


def read(path: Path, moments: Sequence[float]) -> Iterator[NDArray[np.uint8]]:
    """The frames shown at increasing times, upright RGB, `H W 3`.

    Raises:
        NotForDecordError: use another reader for the remaining frames.
    """
    decord = _decord()
    if decord is None:
        raise NotForDecordError("decord is not installed")
    try:
        # One reader per call: sharing a reader between threads crashes the process.
        reader = decord.VideoReader(str(path), num_threads=1)
        indices = deque(shown_at(_times(reader, moments[-1]), moments))
        # Decode every frame: decord seeks to skip frames, and after a seek some codecs return wrong ones.
        for start in range(0, indices[-1] + 1, SLICE):
            numbers = range(start, min(start + SLICE, indices[-1] + 1))
            for number, frame in zip(numbers, reader.get_batch(numbers).asnumpy(), strict=True):
                while indices and indices[0] == number:
                    indices.popleft()
                    yield frame
    except (decord.base.DECORDError, RuntimeError, IndexError, ValueError, OSError) as error:
        raise NotForDecordError(str(error)) from error


def _times(reader: Any, last: float) -> list[float]:
    """Start of each frame in seconds after the first; the clip must reach the last moment.

    Raises:
        NotForDecordError: the times cannot be right: edit lists start below 0, those of AVI and MPEG do not increase.
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
    """The module, or None if it is not installed or its libraries do not load."""
    try:
        decord = importlib.import_module("decord")
    except (ImportError, OSError, RuntimeError):
        return None
    decord.logging.set_level(decord.logging.QUIET)
    return decord
