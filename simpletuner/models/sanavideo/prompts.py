"""The words around a caption that Sana Video was trained with, as far as they can be known without torch.

A caption is lower-cased and stripped, a motion score may follow it, and an instruction goes before it. Negative
prompts and the empty caption stand alone. The instruction's own words are the pipeline's; `text` asks it for them.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.json_files import read_json
from simpletuner.config.option import FALSE_WORDS, TRUE_WORDS
from simpletuner.config.schema import TextConfig
from simpletuner.errors import Problem
from simpletuner.models.spec import Flavour

KEY = "sana_complex_human_instruction"
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


def own_instruction(value: Any, problems: list[Problem]) -> list[str] | None:
    """The lines that `sana_complex_human_instruction` gives: none to switch it off, None for the pipeline's own.

    A text is the name of a file with a JSON list or with one line of the instruction per line.
    """
    word = str(value).strip().lower()
    if word in FALSE_WORDS:
        return []
    if value is None or word in TRUE_WORDS:
        return None
    lines = _read_lines(Path(value).expanduser(), problems) if isinstance(value, str) else value
    if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
        return lines
    if lines is not None:
        problems.append(Problem(KEY, f"{value!r} is not true, false, a list of lines or a file of lines."))
    return None


def text_fingerprint(text: TextConfig, flavour: Flavour) -> str:
    """Instruction and motion score; the pipeline's own instruction is the one of a release of diffusers."""
    lines = own_instruction(text.sana_complex_human_instruction, [])
    words = f"diffusers {importlib.metadata.version('diffusers')} instruction" if lines is None else json.dumps(lines)
    return f"{words}; motion score {text.sana_motion_score}"


def bare_fingerprint(text: TextConfig) -> str:
    """Negative prompts and the empty caption: nothing goes before or after them."""
    return "bare"


def _read_lines(path: Path, problems: list[Problem]) -> Any:
    if not path.is_file():
        problems.append(Problem(KEY, f"{str(path)!r} is neither true nor false nor a file."))
        return None
    return read_json(path, problems) if path.suffix == ".json" else path.read_text(encoding="utf-8").splitlines()
