"""Warns about pictures that earlier versions read differently: without their colour profile, crop or orientation."""

from __future__ import annotations

from collections.abc import Iterator

from simpletuner.data.dataset import Dataset
from simpletuner.data.discovery import CONVERSIONS_SINCE, index_version
from simpletuner.data.sample import Sample
from simpletuner.errors import Problem, counted, shorten, warning


def converted(sample: Sample) -> bool:
    """Whether a sample or its partner is a picture that earlier versions read differently."""
    return bool(sample.conversions or (sample.partner and sample.partner.conversions))


def warn_of_conversions(dataset: Dataset) -> Iterator[Problem]:
    """Say which pictures are encoded again, if their latents may have been cached by an earlier version."""
    names = [sample.name for sample in dataset.samples if converted(sample)]
    version = index_version(dataset.latent_dir)
    if not names or version is None or version >= CONVERSIONS_SINCE:
        return
    message = f"{counted(len(names), 'picture')} ({shorten(names, 3)}) are converted to sRGB, or cropped or turned,"
    cause = "as their files ask; earlier versions did not do so, and what they cached of these is not used again."
    yield warning(dataset.id, f"{message} {cause} `simpletuner cache gc --remove` deletes it.")
