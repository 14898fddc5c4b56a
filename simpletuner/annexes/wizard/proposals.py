"""Defaults and choices that depend on the other answers or on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from simpletuner.config.optimizers import optimizer_name
from simpletuner.config.trackers import PACKAGES, why_missing
from simpletuner.models.spec import TASKS, Flavour
from simpletuner.plan.draft import Draft

# The schema's default, one epoch, is too short for most datasets.
STEPS = 1000


# What the parts of a flavour's name mean.
NAME_PARTS = {
    "sft": "for styles, characters, motions",
    "pretrain": "for entirely new concepts, on large datasets",
    "lite": "the small model",
    "pro": "the large model",
    "5s": "up to 5 s",
    "10s": "up to 10 s",
    "hd": "high resolution",
    "480p": "480 lines",
    "720p": "720 lines",
    "nocfg": "samples without guidance",
    "distilled": "samples in 16 steps without guidance",
    "distilled16steps": "samples in 16 steps without guidance",
}


def flavours(draft: Draft) -> Mapping[str, str]:
    """The family's flavours: what each is for, and what the user must provide."""
    return {each.name: _about(each) for each in draft.spec.flavours}


def _about(flavour: Flavour) -> str:
    parts = [NAME_PARTS[part] for part in flavour.name.split("-") if part in NAME_PARTS]
    needs = [f"needs {flavour.needs}"] if flavour.needs else []
    task = TASKS[flavour.task] + (f", or {TASKS[flavour.dataset_task]}" if flavour.dataset_task else "")
    return ", ".join([task, *parts, *needs])


def run_length(draft: Draft) -> int:
    """Steps to propose; none if the file counts epochs."""
    return 0 if draft.values.get("num_train_epochs") else STEPS


def default_optimizer(draft: Draft) -> str:
    return optimizer_name(draft.config.optimizer, draft.config.precision.mixed_precision)


def prompt_library(draft: Draft) -> str | None:
    """The file of the usual name next to the config, if it exists."""
    path = draft.file.parent / "user_prompt_library.json"
    return path.as_posix() if path.is_file() else None


def usable_trackers(draft: Draft) -> Mapping[str, str]:
    """Trackers that are installed and logged in."""
    remarks = {"none": "nowhere; the HTML report is always written", "wandb": "wandb.ai"}
    names = ["none", *(name for name in PACKAGES if why_missing(name) is None)]
    return {name: remarks.get(name, "") for name in names}


def nearest_sizes(value: str, draft: Draft) -> list[str]:
    """The next smaller and larger sizes that the model can render; empty if the value is fine or not a size."""
    multiple = draft.spec.size_multiple
    parts = [part.strip().lower() for part in value.split(",") if part.strip()]
    if not all(re.fullmatch(r"\d{1,6}(x\d{1,6})?", part) for part in parts):
        return []
    sides = [[int(side) for side in part.split("x")] for part in parts]
    if all(side % multiple == 0 for part in sides for side in part):
        return []
    return [_sizes(sides, multiple, up=False), _sizes(sides, multiple, up=True)]


LONGEST_CLIP = 10_000  # frames; more is certainly a typing error
SEARCHED = 6  # lengths that are tried in each direction


def nearest_lengths(value: str, draft: Draft) -> list[str]:
    """The next shorter and longer lengths that the flavour can render; empty if the value is fine or not a number.

    They fill whole latent frames and pass the flavour's own checks: an i2v flavour has a minimum length.
    """
    stride = draft.spec.frame_stride
    frames = int(value) if re.fullmatch(r"\d{1,6}", value.strip()) else 0
    if not 1 <= frames <= LONGEST_CLIP or ((frames - 1) % stride == 0 and _is_taken(frames, draft)):
        return []
    below = (frames - 1) // stride * stride + 1
    shorter = (below - stride * step for step in range(SEARCHED))
    longer = (below + stride * step for step in range(1, SEARCHED))
    found = [
        next((each for each in lengths if each > 0 and _is_taken(each, draft)), None) for lengths in (shorter, longer)
    ]
    return [str(each) for each in found if each is not None]


def _is_taken(frames: int, draft: Draft) -> bool:
    key = "validation_num_video_frames"
    return not any(problem.fatal for problem in draft.weigh(key, {key: frames}))


def _sizes(parts: list[list[int]], multiple: int, *, up: bool) -> str:
    def move(side: int) -> int:
        return max(multiple, (side + (multiple - 1 if up else 0)) // multiple * multiple)

    return ",".join("x".join(str(move(side)) for side in part) for part in parts)
