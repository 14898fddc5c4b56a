"""Clips from files: what they are without decoding them, their frames as the models take them.

decord reads first, PyAV whatever decord cannot read, or not rightly. Both see a clip upright, and both take frames by
the times at which they are shown, never by their number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simpletuner.data.buckets import Geometry
from simpletuner.data.media import MediaError, fit
from simpletuner.data.timing import ClipFacts, moments_of

__all__ = ["CLIP_SUFFIXES", "ClipFacts", "MediaError", "fit_clip", "frames_of", "is_clip", "probe_clip", "read_clip"]

logger = logging.getLogger(__name__)

CLIP_SUFFIXES = frozenset(
    {".mp4", ".mov", ".avi", ".mkv", ".webm", ".flv", ".wmv", ".m4v", ".mpeg", ".mpg", ".3gp", ".ogv"}
)

# The readers are imported when the first clip is met: runs on pictures start without them.


def is_clip(path: Path) -> bool:
    """Whether a file is a clip by its ending."""
    return path.suffix.lower() in CLIP_SUFFIXES


def probe_clip(path: Path) -> ClipFacts:
    """Size, length and rate of a clip; one frame is decoded, the rest is read from the container.

    Raises:
        MediaError: empty, no clip, without frames, damaged or cut off.
    """
    from simpletuner.data import av_reader

    return av_reader.probe(path)


def frames_of(path: Path, frames: int, rate: float) -> Iterator[NDArray[np.uint8]]:
    """The first frames of a clip at a rate, one by one: upright RGB, `H W 3`.

    Raises:
        MediaError: it cannot be decoded that far.
    """
    from simpletuner.data import av_reader, decord_reader

    moments = moments_of(frames, rate)
    done = 0
    try:
        for frame in decord_reader.read(path, moments):
            yield frame
            done += 1
    except decord_reader.NotForDecordError as error:
        logger.debug("%s is read by PyAV from frame %d on: %s", path, done, error)
    if done < frames:
        yield from av_reader.read(path, moments[done:])


def read_clip(path: Path, frames: int, rate: float) -> NDArray[np.uint8]:
    """The first frames of a clip at a rate, `T H W 3` at its own size; `fit_clip(frames_of(…))` needs less memory.

    Raises:
        MediaError: it cannot be decoded that far.
    """
    return np.stack(list(frames_of(path, frames, rate)))


def fit_clip(frames: Iterable[NDArray[np.uint8]], geometry: Geometry) -> NDArray[np.uint8]:
    """Resize and crop every frame in the same way; only one of them is held at its own size.

    Returns:
        pixels 0..255, `T H W 3`.
    """
    return np.stack([fit(Image.fromarray(np.ascontiguousarray(frame)), geometry) for frame in frames])
