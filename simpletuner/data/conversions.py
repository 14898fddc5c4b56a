"""Warns about files that earlier versions read differently.

Pictures were read without their colour profile, crop or orientation; clips with rounded colours, combs of interlaced
frames, and in black where they are transparent.
"""

from __future__ import annotations

from collections.abc import Iterator

from simpletuner.data.dataset import Dataset
from simpletuner.data.discovery import CONVERSIONS_SINCE, index_version
from simpletuner.data.sample import Sample
from simpletuner.errors import Problem, counted, shorten, warning

REMOVE = "`simpletuner cache gc --remove` deletes it."


def converted(sample: Sample) -> bool:
    """Whether a sample or its partner is a picture that earlier versions read differently."""
    return bool(sample.conversions or (sample.partner and sample.partner.conversions))


def warn_of_conversions(dataset: Dataset) -> Iterator[Problem]:
    """Say which files are encoded again, if their latents may have been cached by an earlier version."""
    version = index_version(dataset.latent_dir)
    if version is None or version >= CONVERSIONS_SINCE:
        return
    pictures = [sample.name for sample in dataset.samples if converted(sample)]
    if pictures:
        named = f"{counted(len(pictures), 'picture')} ({shorten(pictures, 3)})"
        cause = "is applied, which earlier versions did not do. They are encoded again; what was cached is not used."
        yield warning(dataset.id, f"the colour profile or crop stored in {named} {cause} {REMOVE}")
    clips = sum(sample.clip is not None for sample in dataset.samples)
    if clips:
        message = f"the latents of {counted(clips, 'clip')} are made again: colours are exact now, and were up to three"
        yield warning(dataset.id, f"{message} levels off. What earlier versions cached of them is not used. {REMOVE}")
