"""What happens to captions after they are read: parts shuffled, texts filtered out or replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from simpletuner.config.messages import problems_of
from simpletuner.config.option import Flag, Group, Integer, option
from simpletuner.errors import Problem

from .captions import Edit
from .chance import generator

SEPARATORS = {"comma": (",", ", "), "space": (" ", " "), "period": (".", ". ")}  # how to split, how to join
REPLACEMENT = re.compile(r"s/((?:[^/\\]|\\.)*)/((?:[^/\\]|\\.)*)/?")


class CaptionShuffle(Group):
    """caption_shuffle"""

    enable: Flag = option(False, "Whether to shuffle at all.")
    count: Integer = option(1, "Shuffled alternatives per caption.", ge=1)
    seed: Integer = option(0, "Another seed, other orders.")
    split_on: Literal["comma", "space", "period"] = option("comma", "What separates the parts.")
    position_start: Integer = option(0, "Parts before this one stay where they are.", ge=0)
    include_original: Flag = option(True, "Keep the caption as it was written as an alternative.")


def read_shuffle(value: Any, where: str, problems: list[Problem]) -> Edit | None:
    """The edit that a dataset's `caption_shuffle` asks for, or None."""
    if value is None:
        return None
    if not isinstance(value, dict):
        problems.append(Problem(where, f"{value!r} is not an object with enable, count, split_on and so on."))
        return None
    try:
        settings = CaptionShuffle.model_validate(value)
    except ValidationError as error:
        problems.extend(problems_of(error, CaptionShuffle, prefix=f"{where}."))
        return None
    return partial(_shuffle, settings) if settings.enable else None


def _shuffle(settings: CaptionShuffle, caption: str) -> Sequence[str]:
    """The caption and its shuffled forms, each once; the order depends on the text and the seed alone."""
    splitter, joiner = SEPARATORS[settings.split_on]
    parts = [part.strip() for part in caption.split(splitter) if part.strip()]
    fixed, movable = parts[: settings.position_start], parts[settings.position_start :]
    forms = [caption] if settings.include_original else []
    for number in range(settings.count):
        order = list(movable)
        generator("caption shuffle", settings.seed, caption, number).shuffle(order)
        text = joiner.join(fixed + order)
        forms.append(text + "." if settings.split_on == "period" and caption.endswith(".") else text)
    return list(dict.fromkeys(forms))


def read_filters(value: Any, where: str, problems: list[Problem]) -> Edit | None:
    """The edit that a text_embeds entry's `caption_filter_list` asks for, or None.

    Args:
        value: a list of texts, or a file with one on each line or a JSON list of them.
        where: names the key in problems.
        problems: receives what is wrong.
    """
    if value is None:
        return None
    entries = _read_list(Path(value), where, problems) if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        problems.append(Problem(where, f"{value!r} is neither a list of texts nor a file that holds one."))
        return None
    filters = [_read_filter(entry, where, problems) for entry in entries if entry]
    return partial(_filter, filters)


def _read_list(path: Path, where: str, problems: list[Problem]) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".json":
            content = json.loads(text)
            return content if isinstance(content, list) else [content]
        return [line for line in text.splitlines() if line.strip()]
    except OSError as error:
        problems.append(Problem(where, f"{str(path)!r} cannot be read: {error.strerror}."))
    except ValueError as error:
        problems.append(Problem(where, f"{str(path)!r} is not a list of texts: {error}."))
    return []


def _read_filter(entry: str, where: str, problems: list[Problem]) -> tuple[str | None, re.Pattern[str] | None, str]:
    """Literal text, expression and replacement; one of the first two may be missing."""
    replacement = REPLACEMENT.fullmatch(entry)
    pattern, new = (replacement.group(1), replacement.group(2).replace(r"\/", "/")) if replacement else (entry, "")
    try:
        expression = re.compile(pattern)
        expression.sub(new, "")  # finds a replacement that refers to a group that is not there
    except (re.error, IndexError) as error:
        if replacement:
            problems.append(Problem(where, f"{entry!r} is not a regular expression: {error}."))
        return entry, None, ""
    return None if replacement else entry, expression, new


def _filter(filters: Sequence[tuple[str | None, re.Pattern[str] | None, str]], caption: str) -> Sequence[str]:
    """Each entry is taken as plain text where the caption contains it, else as a regular expression."""
    for literal, expression, new in filters:
        if literal is not None and literal in caption:
            caption = caption.replace(literal, "")
        elif expression is not None:
            caption = expression.sub(new, caption)
    return [re.sub(r"[ \t]{2,}", " ", caption).strip()]
