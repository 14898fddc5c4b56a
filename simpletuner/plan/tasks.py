"""Which task a run has where one checkpoint serves two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from simpletuner.config.datasets import DatasetConfig
from simpletuner.models.spec import Flavour


def settle_task(flavour: Flavour, entries: Sequence[DatasetConfig]) -> tuple[Flavour, list[DatasetConfig]]:
    """The flavour with the task that the datasets ask for, and the datasets with that question answered.

    A flavour without a choice is left as it is. One with a choice has its other task as soon as one trained dataset
    sets `video.is_i2v`; datasets beside it that do not are trained as before, from noise alone.
    """
    if flavour.dataset_task is None:
        return flavour, list(entries)
    if any(entry.is_trained and entry.video.is_i2v for entry in entries):
        flavour = replace(flavour, task=flavour.dataset_task)
    return flavour, [_answered(entry) for entry in entries]


def _answered(entry: DatasetConfig) -> DatasetConfig:
    if not entry.holds_clips:
        return entry
    video = entry.video.model_copy(update={"is_i2v": bool(entry.video.is_i2v)})
    return entry.model_copy(update={"video": video})
