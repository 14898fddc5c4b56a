"""The library file of preview prompts: a JSON object of names and prompts, in their order.

A prompt is a text, or an object with its text (`prompt`) and settings of its own. Keys that begin
with an underscore are comments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from simpletuner.config.absent import REMOVED_IN
from simpletuner.config.json_reader import json_kind, read_json
from simpletuner.config.paths import home_path, missing_path, why_no_file
from simpletuner.config.types import Size, parse_integer, parse_number, parse_sizes, parse_text
from simpletuner.data.buckets import Geometry
from simpletuner.data.files import MediaError, content_hash
from simpletuner.data.pictures import inspect
from simpletuner.data.sample import Sample
from simpletuner.errors import Problems, did_you_mean

LIBRARY = "user_prompt_library"
LOWEST_GUIDANCE = 1.0  # as of validation_guidance
HIGHEST_GUIDANCE = 100.0


@dataclass(frozen=True)
class LibraryPrompt:
    """A prompt of a library file; settings that are None are those of the run.

    Attributes:
        nickname: the user's name for it.
        guidance: guidance scale.
        size: in place of all sizes of `validation_resolution`.
        picture: path of the picture from which edits and clips of a first frame start.
    """

    nickname: str
    prompt: str
    seed: int | None = None
    guidance: float | None = None
    size: Size | None = None
    picture: str | None = None


def read_library(path: Path, report: Problems) -> list[LibraryPrompt]:
    """The prompts of a library file."""
    if not path.is_file():
        report.error(LIBRARY, f"{str(path)!r} {why_no_file(path)}.")
        return []
    of_file = Problems()
    content = read_json(path, of_file)
    report.extend(of_file)
    if isinstance(content, dict):
        return parse_library(str(path), content, report)
    if not of_file.are_fatal:
        report.error(
            LIBRARY, f"{path} must hold one object of nickname to prompt, not {json_kind(content)}."
        )
    return []


def parse_library(path: str, content: Mapping[str, Any], report: Problems) -> list[LibraryPrompt]:
    """The prompts in the content of a library file.

    Args:
        path: of the file, for messages.
    """
    prompts = []
    for nickname, value in content.items():
        entry: dict[str, Any] = dict(value) if isinstance(value, dict) else {"prompt": value}
        if "adapter_strength" in entry:
            # Without validation_adapter_path it has nothing to act on, so it is not refused.
            del entry["adapter_strength"]
            report.warn(
                LIBRARY,
                f"{path}: 'adapter_strength' of {nickname!r} was removed in {REMOVED_IN} with "
                "validation_adapter_path. It is ignored.",
            )
        faults = _faults(nickname, entry)
        for fault in faults:
            report.error(LIBRARY, f"{path}: {fault}")
        if not faults:
            settings = {name: PARSERS[name](entry[name]) for name in PARSERS if name in entry}
            settings["size"] = settings.pop("resolution", None)
            prompts.append(LibraryPrompt(nickname, entry["prompt"], **settings))
    return prompts


def _faults(nickname: str, entry: Mapping[str, Any]) -> list[str]:
    """What is wrong with an entry, as ends of messages."""
    faults = []
    known = ("prompt", *PARSERS)
    for name in entry:
        if name not in known and not name.startswith("_"):
            guess = did_you_mean(name, known)
            faults.append(
                f"{name!r} of {nickname!r} is not a known key ({', '.join(known)}).{guess}"
            )
    if faults:
        return faults  # a misspelled `prompt` is also missing
    prompt = entry.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        faults.append(f"the prompt {nickname!r} is empty or not text.")
    for name, parse in PARSERS.items():
        try:
            parse(entry.get(name))
        except ValueError as error:
            faults.append(f"{name!r} of {nickname!r}: {entry[name]!r} {error}.")
    return faults


def _seed(value: object) -> int:
    seed = cast("int", parse_integer(value))
    if seed < 0:
        raise ValueError("is below 0")
    return seed


def _guidance(value: object) -> float:
    guidance = parse_number(value)
    if not LOWEST_GUIDANCE <= guidance <= HIGHEST_GUIDANCE:
        raise ValueError(f"is not between {LOWEST_GUIDANCE:g} and {HIGHEST_GUIDANCE:g}")
    return guidance


def _size(value: object) -> Size:
    sizes = cast("tuple[Size, ...]", parse_sizes(value))
    if len(sizes) > 1:
        raise ValueError("has several sizes; a prompt has one, such as 1024 or 1280x768")
    return sizes[0]


def _picture(value: object) -> str:
    path = str(parse_text(value))
    if not path.strip():
        raise ValueError("names no file")
    return path


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    """A parser that returns None for null."""
    return lambda value: None if value is None else parse(value)


# The settings of a prompt, by key.
PARSERS: Mapping[str, Callable[[object], Any]] = {
    "seed": _optional(_seed),
    "guidance": _optional(_guidance),
    "resolution": _optional(_size),
    "picture": _optional(_picture),
}


def open_picture(path: Path) -> Sample:
    """The source picture of samples, at its original size.

    Raises:
        MediaError: it cannot be read.
    """
    stamp = 0
    if path.is_file():
        stamp = path.stat().st_mtime_ns
    return _opened_picture(path, stamp)


# The page judges its form after every change, and would hash all pictures each time.
@lru_cache(maxsize=256)
def _opened_picture(path: Path, stamp: int) -> Sample:
    """As `open_picture`; `stamp` changes with the file."""
    facts = inspect(path)
    digest = content_hash(path)
    size = Size(facts.width, facts.height)
    uncropped = Geometry("", size, size, (0, 0))
    return Sample(
        "image",
        path.name,
        path.parent,
        digest,
        size,
        uncropped,
        conversions=facts.conversions,
    )


def find_picture(path: str, nickname: str, written: str, report: Problems) -> Sample | None:
    """The picture that a prompt of a library file names; None if it cannot be read.

    Args:
        path: of the library file.
        written: the path of the picture; relative to the working directory.
    """
    path_of_picture = home_path(written)
    try:
        if not path_of_picture.exists():
            report.error(
                LIBRARY, f"{path}: 'picture' of {nickname!r}: {missing_path(path_of_picture)}"
            )
            return None
        return open_picture(path_of_picture)
    except MediaError as error:
        report.error(LIBRARY, f"{path}: 'picture' of {nickname!r}: {written!r} {error}.")
    except (OSError, ValueError):
        report.error(LIBRARY, f"{path}: 'picture' of {nickname!r}: {written!r} is not a path.")
    return None
