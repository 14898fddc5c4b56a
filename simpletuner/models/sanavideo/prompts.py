"""The words around a caption that Sana Video was trained with, as far as they can be known without torch.

A caption is lower-cased and stripped, a motion score may follow it, and an instruction goes before it. Negative
prompts and the empty caption stand alone. The instruction's own words are the pipeline's; `text` asks it for them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.load import FamilyOptions
from simpletuner.models.sanavideo.options import SanaOptions
from simpletuner.models.spec import Flavour

# The way the pipeline's users write it; a caption that ends so has a score of its own.
MOTION_SCORE = re.compile(r"motion score: *\d+(\.\d+)?\.?$")


def clean_caption(caption: str) -> str:
    """The caption as the pipeline cleans it."""
    return caption.lower().strip()


def with_motion_score(caption: str, score: float | None) -> str:
    """A cleaned caption followed by the score, unless it is empty or ends with one of its own."""
    if score is None or not caption or MOTION_SCORE.search(caption):
        return caption
    return f"{caption} motion score: {score:g}."


def dataset_caption(dataset: DatasetConfig, caption: str) -> str:
    """The caption with the dataset's own score behind it; a score of the run is then not added any more."""
    if dataset.sana_motion_score is None:
        return caption
    return with_motion_score(clean_caption(caption), dataset.sana_motion_score)


def text_fingerprint(options: FamilyOptions, flavour: Flavour) -> str:
    """Instruction and motion score; the pipeline's own instruction is the one of a release of diffusers."""
    own = options.of(SanaOptions)
    lines = own.sana_complex_human_instruction
    words = f"diffusers {importlib.metadata.version('diffusers')} instruction" if lines is True else json.dumps(lines)
    return f"{words}; motion score {own.sana_motion_score}"


def bare_fingerprint(options: FamilyOptions) -> str:
    """Negative prompts and the empty caption: nothing goes before or after them."""
    return "bare"
