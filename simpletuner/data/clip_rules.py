"""From the `video` keys of a dataset to checked `ClipRules`: how many frames of a clip are trained, at which rate.

Lengths are counted in frames at the dataset's rate, after resampling. The models take 1, 5, 9, … frames: 4k + 1 frames
become k + 1 latent frames. Other lengths are rounded down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from simpletuner.config.datasets import DatasetConfig, VideoConfig
from simpletuner.data.buckets import Geometry
from simpletuner.data.clips import ClipFacts, ColorMatrix
from simpletuner.data.context import DataContext
from simpletuner.errors import Problem

DEFAULT_SECONDS = 5
# Relative; to a viewer 23.976 and 24 frames a second are the same speed.
SAME_SPEED = 0.02


class ClipLengthError(Exception):
    """A clip of unusable length; the text says what would work and fits after the file's name."""

    def __init__(self, reason: Literal["too short", "too long"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class ClipRules:
    """Everything a dataset says about time.

    Attributes:
        rate: frames per second that are taken.
        stride: frames per latent frame.
        num_frames: the length of every sample; None: each clip has its own.
        interval: a clip's own length is rounded down to a multiple of it, then to the stride.
        minimum, maximum: clips with fewer or more frames are left out.
        names_size: buckets are labelled with size and frames instead of the ratio.
        is_i2v: frame 0 is the condition.
        matrix: colour matrix of untagged clips; None: as players guess.
    """

    rate: float
    stride: int
    num_frames: int | None
    interval: int
    minimum: int
    maximum: int | None
    names_size: bool = False
    is_i2v: bool = False
    matrix: ColorMatrix | None = None

    def read(self, clip: ClipFacts) -> ClipFacts:
        """The clip's facts with the dataset's colour matrix, if the clip is untagged."""
        return replace(clip, matrix=self.matrix) if clip.matrix and self.matrix else clip

    def frames_of(self, clip: ClipFacts) -> int:
        """How many frames of a clip are trained.

        Raises:
            ClipLengthError: it is left out.
        """
        length = clip.frames_at(self.rate)
        has = f"has {length} frames at {self.rate:g} a second"
        if length < self.minimum:
            best = fitting_frames(length, self.stride)
            message = f"{has}, fewer than video.min_frames {self.minimum}; num_frames and min_frames {best} would work"
            raise ClipLengthError("too short", message)
        if self.maximum is not None and length > self.maximum:
            message = f"{has}, more than video.max_frames {self.maximum}; max_frames {length} would work"
            raise ClipLengthError("too long", message)
        # A clip shorter than one interval keeps its own length.
        return self.num_frames or fitting_frames(length // self.interval * self.interval or length, self.stride)

    def label(self, geometry: Geometry, frames: int) -> Geometry:
        """The geometry in the bucket of its size and length, or unchanged if the ratio is the label."""
        width, height = geometry.size
        return replace(geometry, bucket=f"{width}x{height}@{frames}") if self.names_size else geometry


def fitting_frames(frames: int, stride: int) -> int:
    """The largest length up to `frames` that the VAE maps to whole latent frames: 4k+1 for a stride of 4."""
    return frames - (frames - 1) % stride


def build_clip_rules(config: DatasetConfig, context: DataContext, problems: list[Problem]) -> ClipRules | None:
    """The rules of a dataset of clips; None for pictures.

    Args:
        config: the entry with its defaults filled in.
        problems: receives errors, and keys that have no effect.
    """
    video, native = config.video, context.frame_rate
    if not config.holds_clips or native is None:
        if video.model_copy(update={"is_i2v": video.is_i2v or None}) != VideoConfig():
            message = "has no effect: it is for datasets of clips (dataset_type video)."
            problems.append(Problem(f"{config.id}.video", message, fatal=False))
        return None
    _check_switches(config, problems)
    stride = context.spec.frame_stride
    keeps_length = _keeps_length(video)
    num_frames = None if keeps_length else _num_frames(config, native, stride, problems)
    rules = ClipRules(
        rate=video.frame_rate or native,
        stride=stride,
        num_frames=num_frames,
        interval=video.frame_interval or 1,
        minimum=video.min_frames or num_frames or video.frame_interval or 1,
        maximum=video.max_frames,
        names_size=video.bucket_strategy == "resolution_frames",
        is_i2v=context.task == "i2v" if video.is_i2v is None else video.is_i2v,
        matrix=video.color_matrix,
    )
    _check_limits(config, rules, problems)
    return _check_condition(config, rules, context, problems)


def _keeps_length(video: VideoConfig) -> bool:
    return bool(video.frame_interval) and video.num_frames is None and video.bucket_strategy == "resolution_frames"


def _check_switches(config: DatasetConfig, problems: list[Problem]) -> None:
    video, where = config.video, f"{config.id}.video.frame_interval"
    if video.frame_interval is None:
        return
    if video.bucket_strategy != "resolution_frames":
        message = "has no effect without bucket_strategy resolution_frames."
        problems.append(Problem(where, message, fatal=False))
    elif video.num_frames is not None:
        message = f"has no effect: num_frames {video.num_frames} gives every clip the same length."
        problems.append(Problem(where, message, fatal=False))


def _num_frames(config: DatasetConfig, native: float, stride: int, problems: list[Problem]) -> int:
    """The configured length, or about five seconds, rounded down to one that the model takes."""
    wanted = config.video.num_frames
    if wanted is None:
        return fitting_frames(round(DEFAULT_SECONDS * native) + 1, stride)
    fitting = fitting_frames(wanted, stride)
    if fitting != wanted:
        message = f"{wanted} is not a multiple of {stride} plus 1: {fitting} frames are trained."
        problems.append(Problem(f"{config.id}.video.num_frames", message, fatal=False))
    return fitting


def _check_limits(config: DatasetConfig, rules: ClipRules, problems: list[Problem]) -> None:
    if rules.num_frames is not None and rules.minimum < rules.num_frames:
        origin = "" if config.video.num_frames else f" (the default of {DEFAULT_SECONDS} seconds)"
        message = f"{rules.minimum} is below num_frames {rules.num_frames}{origin}: a clip may be shorter than that."
        problems.append(Problem(f"{config.id}.video.min_frames", message))
    if rules.maximum is not None and rules.maximum < rules.minimum:
        message = f"{rules.maximum} is below the {rules.minimum} frames that a clip needs: no clip fits."
        problems.append(Problem(f"{config.id}.video.max_frames", message))


def _check_condition(
    config: DatasetConfig, rules: ClipRules, context: DataContext, problems: list[Problem]
) -> ClipRules:
    """Frame 0 can be a condition only if the model takes one and other frames are left to train."""
    if not rules.is_i2v:
        return rules
    if context.task != "i2v":
        names = [flavour.name for flavour in context.spec.flavours if flavour.task == "i2v"]
        message = f"this flavour of {context.spec.name} takes no first frame; these do: {', '.join(names)}."
        problems.append(Problem(f"{config.id}.video.is_i2v", message))
    shortest = rules.stride + 1
    if rules.num_frames is not None and rules.num_frames < shortest:
        message = f"{rules.num_frames} leaves nothing to train after the first frame; the minimum is {shortest}."
        problems.append(Problem(f"{config.id}.video.num_frames", message))
    return replace(rules, minimum=max(rules.minimum, shortest))


def check_frame_rate(
    where: str, rules: ClipRules, clips: Mapping[str, ClipFacts], model_rate: float, problems: list[Problem]
) -> None:
    """One warning about whatever makes clips move at another speed than the model's, or less smoothly.

    Args:
        where: names the key in the warning.
        clips: those that are trained, by name.
        model_rate: frames per second that the model was trained at.
    """
    found = []
    if abs(rules.rate / model_rate - 1) > SAME_SPEED:
        factor = model_rate / rules.rate
        found.append(
            f"frames are taken at {rules.rate:g} a second and the model plays {model_rate:g}: "
            f"what it learns moves {factor:.2f} times as fast"
        )
    slow = {
        name: clip.source_rate for name, clip in clips.items() if 0 < clip.source_rate < rules.rate * (1 - SAME_SPEED)
    }
    if slow:
        slowest = min(slow, key=lambda name: slow[name])
        found.append(
            f"{len(slow)} of {len(clips)} clips have fewer than the {rules.rate:g} frames a second that are taken "
            f"({slowest} has {slow[slowest]:.4g}): frames are seen up to {rules.rate / slow[slowest]:.2f} times"
        )
    if found:
        problems.append(Problem(where, f"{'; '.join(found)}.", fatal=False))
