"""Defaults and choices that depend on the other answers or on this machine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from huggingface_hub import get_token

from simpletuner.config.optimizers import optimizer_name
from simpletuner.config.schema import DEFAULT_LEARNING_RATES
from simpletuner.plan.draft import Draft
from simpletuner.reporting.trackers import KNOWN, check_trackers

# No default of the schema: without a number of steps one round through the pictures decides.
STEPS = 1000


def first_flavour(draft: Draft) -> str:
    return draft.spec.flavours[0].name


def flavours(draft: Draft) -> Mapping[str, str]:
    """The family's flavours, with what a user must bring for them."""
    return {each.name: f"needs {each.needs}" if each.needs else "" for each in draft.spec.flavours}


def rank(draft: Draft) -> float:
    return float(draft.config.lora.lora_rank)


def run_length(draft: Draft) -> int:
    """Steps to propose: none when the file counts epochs."""
    return 0 if draft.values.get("num_train_epochs") else STEPS


def default_optimizer(draft: Draft) -> str:
    return optimizer_name(draft.config.optimizer, draft.config.precision.mixed_precision)


def default_rate(draft: Draft) -> float:
    return DEFAULT_LEARNING_RATES[draft.config.model.model_type]


def dataset_file(draft: Draft) -> str:
    return draft.dataset_file


def prompt_library(draft: Draft) -> str | None:
    """The file of the usual name beside the config, if it is there."""
    path = draft.file.parent / "user_prompt_library.json"
    return path.as_posix() if path.is_file() else None


def usable_trackers(draft: Draft) -> Mapping[str, str]:
    """Trackers that are installed and logged in."""
    remarks = {"none": "nowhere; a report is written in any case", "wandb": "wandb.ai"}
    names = [name for name in ("none", *KNOWN) if name not in ("all", "simpletuner") and not check_trackers(name)]
    return {name: remarks.get(name, "") for name in names}


def hub_login(draft: Draft) -> bool:
    """Whether this machine is logged in to the hub."""
    return get_token() is not None


def nearest_sizes(value: str, draft: Draft) -> list[str]:
    """The next smaller and larger sizes that the model can make; empty when the value is fine or no size at all."""
    multiple = draft.spec.size_multiple
    parts = [part.strip().lower() for part in value.split(",") if part.strip()]
    if not all(re.fullmatch(r"\d{1,6}(x\d{1,6})?", part) for part in parts):
        return []
    sides = [[int(side) for side in part.split("x")] for part in parts]
    if all(side % multiple == 0 for part in sides for side in part):
        return []
    return [_sizes(sides, multiple, up=False), _sizes(sides, multiple, up=True)]


def nearest_lengths(value: str, draft: Draft) -> list[str]:
    """The next shorter and longer clips that fill whole latent frames; empty when the value is fine or no number."""
    stride = draft.spec.frame_stride
    frames = int(value) if re.fullmatch(r"\d{1,6}", value.strip()) else 1
    if frames < 1 or (frames - 1) % stride == 0:
        return []
    below = (frames - 1) // stride * stride + 1
    return [str(below), str(below + stride)]


def _sizes(parts: list[list[int]], multiple: int, *, up: bool) -> str:
    def move(side: int) -> int:
        return max(multiple, (side + (multiple - 1 if up else 0)) // multiple * multiple)

    return ",".join("x".join(str(move(side)) for side in part) for part in parts)
