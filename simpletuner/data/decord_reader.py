"""Clips through decord: quick, but not maintained, made for some machines only, and wrong about some files.

The one place that knows it. `read` refuses whatever decord may be wrong about, and `clips` asks PyAV then.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .timing import shown_at

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
        indices = shown_at(_times(reader), moments)
        for start in range(0, len(indices), SLICE):
            yield from reader.get_batch(indices[start : start + SLICE]).asnumpy()
    except (decord.base.DECORDError, RuntimeError, IndexError, ValueError, OSError) as error:
        raise NotForDecordError(str(error)) from error


def _times(reader: Any) -> list[float]:
    """When each frame begins, in seconds after the first.

    Raises:
        NotForDecordError: they cannot be right. Edit lists begin below 0, AVI and MPEG have none that grow.
    """
    times = [float(begin) for begin, _ in reader.get_frame_timestamp(range(len(reader)))]
    grows = all(earlier < later for earlier, later in pairwise(times))
    if len(times) != len(reader) or not times or times[0] < 0 or not grows:
        raise NotForDecordError("its times are not those of the clip")
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
