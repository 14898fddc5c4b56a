"""Clips: their facts without decoding them, the display times of their frames, and which frames are trained.

Training frame k is what the source shows at k / rate seconds, whatever its own frame rate, constant or not. Times count
from the first frame shown.

decord reads what it reads correctly, PyAV everything else. Both return upright frames, selected by display time and
never by frame number.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simpletuner.data.buckets import Geometry
from simpletuner.data.files import MediaError, UnreadableError
from simpletuner.data.media import AVIF_BRANDS, HEIF_BRANDS, fit

T = TypeVar("T")

logger = logging.getLogger(__name__)

CLIP_SUFFIXES = frozenset(
    {".mp4", ".mov", ".avi", ".mkv", ".webm", ".flv", ".wmv", ".m4v", ".mpeg", ".mpg", ".3gp", ".ogv"}
)

# First bytes of a file, and the extension for it.
CLIP_MAGIC = (
    (b"\x1aE\xdf\xa3", ".mkv"),
    (b"FLV", ".flv"),
    (b"0&\xb2u\x8ef\xcf\x11", ".wmv"),
    (b"\0\0\1\xba", ".mpg"),
    (b"\0\0\1\xb3", ".mpg"),
    (b"OggS", ".ogv"),
)
BRANDS = {b"qt  ": ".mov", b"M4V ": ".m4v"}

ColorMatrix = Literal["bt601", "bt709"]

# Seconds. Containers round times to milliseconds or to 1/600 s, so a frame may appear to start this much late.
TOLERANCE = 0.002
# If the next frame starts within this time, it is taken instead of repeating the current one.
REPEAT_TOLERANCE = 3 * TOLERANCE
# Seconds that may be missing at the end before a clip counts as truncated: headers are not exact.
MISSING_SECONDS = 0.25
# Relative. NTSC video runs at 1000/1001 of its nominal rate, so 23.976 and 24 frames a second are the same rate.
SAME_RATE = 0.002


def clip_suffix(head: bytes) -> str | None:
    """The extension of a clip by its first 12 bytes or more; None for what is no clip."""
    if head[4:8] == b"ftyp" and head[8:12] not in AVIF_BRANDS + HEIF_BRANDS:
        return ".3gp" if head[8:10] == b"3g" else BRANDS.get(head[8:12], ".mp4")
    if head[4:8] in (b"moov", b"mdat", b"wide"):
        return ".mov"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return ".avi"
    return next((suffix for magic, suffix in CLIP_MAGIC if head.startswith(magic)), None)


@dataclass(frozen=True)
class ClipFacts:
    """What is known of a clip without decoding it.

    Attributes:
        width, height: as shown: upright, in square pixels.
        seconds: from the first frame to the end of the last one.
        source_rate: its own average frames per second; 0 for a single frame.
        matrix: colour matrix assumed for an untagged file; None for a tagged one.
    """

    width: int
    height: int
    seconds: float
    source_rate: float
    matrix: ColorMatrix | None = None

    def frames_at(self, rate: float) -> int:
        """Number of frames at a rate, at least one."""
        # Without the tolerance, rounding in the container would add a frame that starts at the very end.
        return max(1, math.ceil((self.seconds - TOLERANCE) * rate / self.slowed(rate)))

    def moments(self, frames: int, rate: float) -> list[float]:
        """The times in seconds at which the first frames are taken."""
        return moments_of(frames, rate / self.slowed(rate))

    def slowed(self, rate: float) -> float:
        """Factor close to 1 that maps its own rate and `rate` to the whole numbers they stand for.

        Without it, taking 24 frames per second from a clip at 23.976 would repeat a frame every 42 seconds, the first
        one as soon as the tolerance is used up.
        """
        own = self.source_rate
        if not own:
            return 1.0
        if abs(own / rate - 1) <= SAME_RATE:
            return rate / own
        return _whole(own) / own * rate / _whole(rate)


def _whole(rate: float) -> float:
    """The whole number within `SAME_RATE` of a rate, or the rate itself."""
    whole = round(rate)
    return float(whole) if whole and abs(rate / whole - 1) <= SAME_RATE else rate


def moments_of(frames: int, rate: float) -> list[float]:
    """The times in seconds at which the first frames are taken."""
    return [index / rate for index in range(frames)]


def stays(moment: float, following: float, *, taken: bool) -> bool:
    """Whether a frame is still taken at a moment when the next one starts at `following`.

    Args:
        taken: it has been taken before; it is repeated only if the next one is not due soon.
    """
    return moment + (REPEAT_TOLERANCE if taken else TOLERANCE) < following


def shown_at(times: Sequence[float], moments: Sequence[float]) -> list[int]:
    """Index of the frame taken at each moment, of frames that start at `times`; both increase."""
    found: list[int] = []
    index = 0
    for moment in moments:
        while index + 1 < len(times) and not stays(moment, times[index + 1], taken=found[-1:] == [index]):
            index += 1
        found.append(index)
    return found


def is_clip(path: Path) -> bool:
    """Whether a file is a clip, by its extension."""
    return path.suffix.lower() in CLIP_SUFFIXES


def probe_clip(path: Path) -> ClipFacts:
    """Size, length and rate of a clip; one frame is decoded, the rest is read from the container.

    Raises:
        MediaError: empty, not a clip, without frames, damaged or truncated.
    """
    from simpletuner.data import av_reader  # imported late, so that runs on pictures start without it

    return retry_once(lambda: av_reader.read_facts(path))


def frames_of(path: Path, frames: int, rate: float, clip: ClipFacts) -> Iterator[NDArray[np.uint8]]:
    """The first frames of a clip at a rate, one by one: upright RGB, `H W 3`.

    Args:
        clip: from `probe_clip`.

    Raises:
        MediaError: it cannot be decoded that far.
    """
    from simpletuner.data import av_reader, decord_reader

    moments = clip.moments(frames, rate)
    done = 0
    if clip.matrix != "bt709":  # decord reads untagged colours as BT.601
        try:
            for frame in decord_reader.read(path, moments):
                yield frame
                done += 1
        except decord_reader.NotForDecordError as error:
            logger.debug("%s is read by PyAV from frame %d on: %s", path, done, error)
    if done < frames:
        yield from av_reader.read(path, moments[done:], clip.matrix)


def retry_once(attempt: Callable[[], T]) -> T:
    """Call `attempt` again if it fails: a clip counts as damaged only if decoding it fails twice.

    The readers do not tell damaged data from a failing device.
    """
    try:
        return attempt()
    except UnreadableError:
        raise
    except MediaError:
        return attempt()


def fit_clip(frames: Iterable[NDArray[np.uint8]], geometry: Geometry) -> NDArray[np.uint8]:
    """Resize and crop every frame in the same way; only one at a time is held at its original size.

    Returns:
        pixels 0..255, `T H W 3`.
    """
    return np.stack([fit(Image.fromarray(np.ascontiguousarray(frame)), geometry) for frame in frames])
