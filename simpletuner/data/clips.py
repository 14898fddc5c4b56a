"""Clips: facts read without decoding, and the choice of the frames to train.

Training frame k is the frame that the source shows at k / rate seconds, whatever the source's frame
rate, constant or variable. Times count from the first frame shown.

Lengths are frames at the dataset's rate, after resampling. The models take 1, 5, 9, … frames: 4k +
1 frames become k + 1 latent frames. Other lengths are rounded down.
"""

from __future__ import annotations

import importlib.util
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simpletuner.config.datasets import DatasetConfig, VideoConfig
from simpletuner.data.buckets import Geometry
from simpletuner.data.files import (
    LeftOutError,
    MediaError,
    UnreadableError,
    UnsuitableError,
    unknown_errors_as_unsuitable,
    with_known_errors,
)
from simpletuner.data.picture_formats import AVIF_BRANDS, HEIF_BRANDS
from simpletuner.data.pictures import decode, fit
from simpletuner.errors import Problems, counted

if TYPE_CHECKING:
    from simpletuner.data.entries import DataContext

T = TypeVar("T")

CLIP_SUFFIXES = frozenset(
    {".mp4", ".mov", ".avi", ".mkv", ".webm", ".flv", ".wmv", ".m4v", ".mpeg", ".mpg", ".ogv"}
    | {".gif", ".3gp", ".ts", ".mts", ".m2ts"}
)

# (first bytes of a file, its extension)
CLIP_MAGIC = (
    (b"\x1aE\xdf\xa3", ".mkv"),
    (b"FLV", ".flv"),
    (b"0&\xb2u\x8ef\xcf\x11", ".wmv"),
    (b"\0\0\1\xba", ".mpg"),
    (b"\0\0\1\xb3", ".mpg"),
    (b"OggS", ".ogv"),
)
# Extensions by the brand of an MP4 file; any other brand is `.mp4`.
BRANDS = {b"qt  ": ".mov", b"M4V ": ".m4v"}

ColorMatrix = Literal["bt601", "bt709"]
ClipReader = Literal["pyav", "decord"]

# Seconds. Containers round times to milliseconds or to 1/600 s, so a frame may seem to start this
# late.
TOLERANCE = 0.002
# If the next frame starts within this time, use it instead of repeating the current frame.
REPEAT_TOLERANCE = 3 * TOLERANCE
# Seconds missing at the end before a clip counts as truncated; declared durations are not exact.
MISSING_SECONDS = 0.25
# Relative. NTSC video runs at 1000/1001 of its nominal rate, so 23.976 and 24 fps are one rate.
SAME_RATE = 0.002
# Relative; to a viewer 23.976 and 24 fps are the same speed.
SAME_SPEED = 0.02
# The length that the models were made for: 121 frames at 24 fps, 81 at 16.
DEFAULT_SECONDS = 5


def clip_suffix(head: bytes) -> str | None:
    """The extension of a clip by its first 12 bytes or more; None if it is not a clip."""
    if head[4:8] == b"ftyp" and head[8:12] not in AVIF_BRANDS + HEIF_BRANDS:
        if head[8:10] == b"3g":
            return ".3gp"
        return BRANDS.get(head[8:12], ".mp4")
    if head[4:8] in (b"moov", b"mdat", b"wide"):
        return ".mov"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return ".avi"
    for magic, suffix in CLIP_MAGIC:
        if head.startswith(magic):
            return suffix
    return None


@dataclass(frozen=True)
class ClipFacts:
    """Facts of a clip, read without decoding it.

    Attributes:
        width, height: display size: upright, in square pixels.
        seconds: from the start of the first frame to the end of the last.
        source_rate: average frames per second of the source; 0 for a single frame.
        matrix: colour matrix assumed for an untagged file; None for a tagged one.
        is_interlaced: its first frame consists of two fields; the frames are deinterlaced.
        reader: what decodes the frames: PyAV, or decord for files that PyAV cannot read.
    """

    width: int
    height: int
    seconds: float
    source_rate: float
    matrix: ColorMatrix | None = None
    is_interlaced: bool = False
    reader: ClipReader = "pyav"

    @property
    def decoding(self) -> str:
        """How the frames are decoded, for the plan; empty for the usual way."""
        if self.reader == "decord":
            return "decoded by decord"
        if self.is_interlaced:
            return "deinterlaced"
        return ""

    def frames_at(self, rate: float) -> int:
        """Number of frames at a rate, at least one."""
        # Without the tolerance, rounding in the container would add a frame that starts at the end.
        return max(1, math.ceil((self.seconds - TOLERANCE) * rate / self.slowed(rate)))

    def moments(self, frames: int, rate: float) -> list[float]:
        """The times in seconds at which the first frames are taken."""
        return moments_of(frames, rate / self.slowed(rate))

    def slowed(self, rate: float) -> float:
        """Factor close to 1 that maps the source's rate and `rate` to their nominal whole numbers.

        Without it, sampling a 23.976 fps clip at 24 fps would repeat a frame every 42 seconds, the
        first one as soon as the tolerance is used up.
        """
        source = self.source_rate
        if not source:
            return 1.0
        # The same nominal rate: every frame is used once.
        if abs(source / rate - 1) <= SAME_RATE:
            return rate / source
        # Different rates keep their nominal ratio: 29.97 to 24 is read as 30 to 24.
        return _nominal(source) / source * rate / _nominal(rate)


def _nominal(rate: float) -> float:
    """The whole number within `SAME_RATE` of a rate, or the rate itself."""
    whole = round(rate)
    if whole and abs(rate / whole - 1) <= SAME_RATE:
        return float(whole)
    return rate


def moments_of(frames: int, rate: float) -> list[float]:
    """The times in seconds at which the first frames are taken."""
    return [index / rate for index in range(frames)]


def choose_frames(frames: Iterable[tuple[T, float]], moments: Iterable[float]) -> Iterator[T]:
    """The frame shown at each moment.

    A frame is repeated unless the next one is due within `REPEAT_TOLERANCE`; the last frame is
    shown forever.

    Args:
        frames: (frame, start in seconds), in increasing order.
        moments: seconds, in increasing order.
    """
    wanted = deque(moments)
    end = (None, math.inf)
    pairs: Iterable[Any] = pairwise(chain(frames, [end]))
    for (frame, _), (_, next_start) in pairs:
        tolerance = TOLERANCE
        while wanted and wanted[0] + tolerance < next_start:
            wanted.popleft()
            yield frame
            tolerance = REPEAT_TOLERANCE  # from here on the frame is repeated
        if not wanted:
            return


def is_clip(path: Path) -> bool:
    """Whether a file is a clip, by its extension."""
    return path.suffix.lower() in CLIP_SUFFIXES


def probe_clip(path: Path) -> ClipFacts:
    """Size, length and rate of a clip; one frame is decoded, the rest is read from the container.

    Raises:
        MediaError: empty, not a clip, without frames, damaged or truncated.
    """
    # Imported late: runs on pictures do not need PyAV.
    from simpletuner.data import clip_decord, clip_facts, clip_file

    with unknown_errors_as_unsuitable():
        try:
            return retry_once(lambda: clip_facts.read_facts(path))
        except (clip_file.UndecodableError, clip_file.UnsupportedError):
            facts = clip_decord.read_facts_with_decord(path)
            if facts is None:
                raise
            return facts


def frames_of(
    path: Path, frames: int, rate: float, clip: ClipFacts | None, background: str = "white"
) -> Iterator[Image.Image]:
    """The first frames of a clip at a rate, one by one, or a picture: upright RGB.

    A frame that is repeated is the same object.

    Args:
        clip: from `probe_clip`; None for a picture.
        background: colour of transparent areas.

    Raises:
        MediaError: it cannot be decoded that far.
    """
    if clip is None:
        yield decode(path, background)
        return
    from simpletuner.data import clip_decord, clip_frames  # late, as above

    read = clip_frames.read_with_av
    if clip.reader == "decord":
        read = clip_decord.read_with_decord
    yield from with_known_errors(read(path, clip.moments(frames, rate), clip.matrix, background))


def retry_once(attempt: Callable[[], T]) -> T:
    """Call `attempt` again if it fails: a clip counts as damaged only if decoding it fails twice.

    The readers cannot distinguish damaged data from a failing device.
    """
    try:
        return attempt()
    except (UnreadableError, UnsuitableError):
        raise
    except MediaError:
        return attempt()


def fit_clip(frames: Iterable[Image.Image], geometry: Geometry) -> NDArray[np.uint8]:
    """Resize and crop every frame in the same way; holds one frame at a time at its original size.

    Returns:
        pixels 0..255, `T H W 3`.
    """
    fitted: list[NDArray[np.uint8]] = []
    previous: Image.Image | None = None
    for frame in frames:
        # A repeated frame is resized once.
        pixels = fitted[-1] if frame is previous else fit(frame, geometry)
        fitted.append(pixels)
        previous = frame
    return np.stack(fitted)


@dataclass(frozen=True)
class ClipRules:
    """The rules of a dataset for lengths and frame rates.

    Attributes:
        keys: the user's `video` object.
        rate: frames per second at which clips are sampled.
        stride: frames per latent frame.
        num_frames: the length of every sample; None: each clip has its own.
        minimum: clips with fewer frames are left out.
        is_i2v: frame 0 is the condition.
    """

    keys: VideoConfig
    rate: float
    stride: int
    num_frames: int | None
    minimum: int
    is_i2v: bool = False

    @property
    def names_size(self) -> bool:
        """Whether buckets are labelled with size and frames instead of the ratio."""
        return self.keys.bucket_strategy == "resolution_frames"

    def read(self, clip: ClipFacts) -> ClipFacts:
        """The clip's facts with the dataset's reader, and with its colour matrix if untagged."""
        if clip.matrix and self.keys.color_matrix:
            clip = replace(clip, matrix=self.keys.color_matrix)
        if self.keys.reader == "decord":
            clip = replace(clip, reader="decord")
        return clip

    def frames_of(self, clip: ClipFacts) -> int:
        """How many frames of a clip are trained.

        Raises:
            LeftOutError: the clip is too short or too long.
        """
        length = clip.frames_at(self.rate)
        longest = self.keys.max_frames
        has = f"has {counted(length, 'frame')} at {self.rate:g} fps"
        if length < self.minimum:
            best = fitting_frames(length, self.stride)
            message = (
                f"{has}, fewer than video.min_frames {self.minimum}; num_frames and min_frames "
                f"{best} would work"
            )
            raise LeftOutError("too short", message)
        if longest is not None and length > longest:
            message = f"{has}, more than video.max_frames {longest}; {length} would work"
            raise LeftOutError("too long", message)
        if self.num_frames:
            return self.num_frames
        interval = self.keys.frame_interval or 1
        whole_intervals = length // interval * interval
        # A clip shorter than one interval keeps its length.
        return fitting_frames(whole_intervals or length, self.stride)

    def label(self, geometry: Geometry, frames: int) -> Geometry:
        """The geometry with size and length as its bucket, unless buckets are labelled by ratio."""
        if not self.names_size:
            return geometry
        return replace(geometry, bucket=f"{geometry.size}@{frames}")


def fitting_frames(frames: int, stride: int) -> int:
    """The largest length up to `frames` that the VAE maps to whole latent frames.

    4k + 1 for a stride of 4.
    """
    return frames - (frames - 1) % stride


def build_clip_rules(
    config: DatasetConfig, context: DataContext, report: Problems
) -> ClipRules | None:
    """The rules of a dataset of clips; None for pictures.

    Args:
        config: the entry with its defaults filled in.
    """
    video = config.video
    native = context.frame_rate
    if not config.holds_clips or native is None:
        # Pictures may set `is_i2v: false`, which is correct.
        keys = video.model_copy(update={"is_i2v": video.is_i2v or None})
        if keys != VideoConfig():
            report.warn("video", "has no effect: it is for datasets of clips (dataset_type video).")
        return None
    rules = _rules_of(video, native, context)
    with report.within("video") as video_report:
        _check_reader(video, video_report)
        _check_length(rules, video_report)
        _check_condition(rules, context, video_report)
    if rules.is_i2v:
        # Besides the condition, at least one latent frame must be left to train.
        rules = replace(rules, minimum=max(rules.minimum, rules.stride + 1))
    return rules


def _rules_of(video: VideoConfig, native: float, context: DataContext) -> ClipRules:
    """The rules that the keys set; rate and task default to the model's."""
    stride = context.spec.frame_stride
    has_own_lengths = video.bucket_strategy == "resolution_frames" and video.frame_interval
    num_frames: int | None = None
    if video.num_frames or not has_own_lengths:
        # `+ 1`: the VAEs encode the first frame separately.
        wanted = video.num_frames or round(DEFAULT_SECONDS * native) + 1
        num_frames = fitting_frames(wanted, stride)
    is_i2v = video.is_i2v
    if is_i2v is None:
        is_i2v = context.task == "i2v"
    return ClipRules(
        keys=video,
        rate=video.frame_rate or native,
        stride=stride,
        num_frames=num_frames,
        minimum=video.min_frames or num_frames or video.frame_interval or 1,
        is_i2v=is_i2v,
    )


def _check_reader(video: VideoConfig, report: Problems) -> None:
    if video.reader == "decord" and importlib.util.find_spec("decord") is None:
        message = (
            "decord is not installed: pip install decord, or use pyav, which reads more files."
        )
        report.error("reader", message)


def _check_length(rules: ClipRules, report: Problems) -> None:
    video = rules.keys
    length = rules.num_frames
    wanted = video.num_frames
    if video.frame_interval and not rules.names_size:
        report.warn("frame_interval", "has no effect without bucket_strategy resolution_frames.")
    elif video.frame_interval and wanted:
        message = f"has no effect: num_frames {wanted} gives every clip the same length."
        report.warn("frame_interval", message)
    if wanted and length != wanted:
        message = f"{wanted} is not a multiple of {rules.stride} plus 1: {length} are trained."
        report.warn("num_frames", message)
    if length is not None and rules.minimum < length:
        origin = "" if wanted else f" (the default of {DEFAULT_SECONDS} seconds)"
        message = f"{rules.minimum} is below num_frames {length}{origin}: a clip may be shorter."
        report.error("min_frames", message)
    if video.max_frames is not None and video.max_frames < rules.minimum:
        message = f"{video.max_frames} is below the {rules.minimum} frames a clip needs: none fits."
        report.error("max_frames", message)


def _check_condition(rules: ClipRules, context: DataContext, report: Problems) -> None:
    """Frame 0 can be a condition only if the model takes one and other frames are left to train."""
    if not rules.is_i2v:
        return
    if context.task != "i2v":
        names = [flavour.name for flavour in context.spec.flavours if flavour.task == "i2v"]
        message = (
            f"this flavour of {context.spec.name} takes no first frame; use {', '.join(names)}."
        )
        report.error("is_i2v", message)
    shortest = rules.stride + 1
    if rules.num_frames is not None and rules.num_frames < shortest:
        message = (
            f"{rules.num_frames} leaves only the first frame, which is not trained; the minimum "
            f"is {shortest}."
        )
        report.error("num_frames", message)
