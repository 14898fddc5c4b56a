"""The options that only Sana Video has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from simpletuner.config.json_reader import read_json, read_text
from simpletuner.config.option import Group, common, option
from simpletuner.config.paths import home_path
from simpletuner.config.types import FALSE_WORDS, TRUE_WORDS, Number, PathText, parse_json_text
from simpletuner.errors import Problems


def parse_instruction(value: object) -> object:
    """The instruction lines before captions: True means the pipeline's own, an empty list none.

    A string names a file with a JSON list, or a text file with the lines.

    Raises:
        ValueError: it is none of these.
    """
    word = str(value).strip().lower()
    if word in FALSE_WORDS:
        return []
    if word in TRUE_WORDS:
        return True
    lines = parse_json_text(value)
    if isinstance(lines, str):
        lines = _read_lines(home_path(lines))
    if isinstance(lines, list) and all(isinstance(line, str) for line in lines):
        return lines
    raise ValueError("is not true, false, a list of lines or a file of lines")


def _read_lines(path: Path) -> Any:
    """The JSON value of a .json file, or the lines of a text file.

    Raises:
        ValueError: the file cannot be read.
    """
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises for a text that no path can have
        raise ValueError("is neither true nor false nor a file")
    problems = Problems()
    is_json = path.suffix == ".json"
    content: Any = read_json(path, problems) if is_json else read_text(path, problems)
    for problem in problems:
        if problem.fatal:
            raise ValueError(problem.message.removesuffix("."))
    return content if is_json else content.splitlines()


class SanaOptions(Group):
    """Sana Video"""

    pretrained_gemma_model_name_or_path: PathText | None = option(
        None, default_note="the model path"
    )
    """Hub id or folder to take the Gemma text encoder from."""
    sana_motion_score: Number | None = common(None, ge=0, le=1000)
    """Motion score, appended to captions."""
    sana_complex_human_instruction: Annotated[
        Literal[True] | list[str], BeforeValidator(parse_instruction)
    ] = option(True, form="JSON")
    """Instruction text before captions: true, false, a list of lines or a file of lines."""
