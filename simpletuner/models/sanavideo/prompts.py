"""The prompt format of Sana Video. Free of torch.

A caption is lower-cased and stripped, followed by an optional motion score, and preceded by an instruction. Negative
prompts and the empty caption have neither. `text` takes the default instruction from the pipeline.
"""

from __future__ import annotations

import importlib.metadata
import json
import re

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.schema import FamilyOptions
from simpletuner.models.sanavideo.options import SanaOptions
from simpletuner.models.spec import Flavour

# A caption that already ends with a motion score keeps it.
MOTION_SCORE = re.compile(r"motion score: *\d+(\.\d+)?\.?$")


def clean_caption(caption: str) -> str:
    """Clean a caption as the pipeline does."""
    return caption.lower().strip()


def with_motion_score(caption: str, score: float | None) -> str:
    """Append the score to a cleaned caption, unless it is empty or already ends with one."""
    if score is None or not caption or MOTION_SCORE.search(caption):
        return caption
    return f"{caption} motion score: {score:g}."


def dataset_caption(dataset: DatasetConfig, caption: str) -> str:
    """Append the dataset's own score to a caption; the score of the run is then not appended."""
    if dataset.sana_motion_score is None:
        return caption
    return with_motion_score(clean_caption(caption), dataset.sana_motion_score)


def text_fingerprint(options: FamilyOptions, flavour: Flavour) -> str:
    """Instruction and motion score; the default instruction is identified by the release of diffusers."""
    own = options.of(SanaOptions)
    lines = own.sana_complex_human_instruction
    words = f"diffusers {importlib.metadata.version('diffusers')} instruction" if lines is True else json.dumps(lines)
    return f"{words}; motion score {own.sana_motion_score}"


def bare_fingerprint(options: FamilyOptions) -> str:
    """Negative prompts and the empty caption: they have no instruction or motion score."""
    return "bare"
