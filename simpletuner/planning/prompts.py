"""Prompts of previews: those of a run, their library, and the sizes that are rendered."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.config.absent import REMOVED_IN
from simpletuner.config.json_reader import json_kind, read_json
from simpletuner.config.paths import why_no_file
from simpletuner.config.schema import ValidationConfig
from simpletuner.config.types import Size
from simpletuner.errors import Problems, did_you_mean
from simpletuner.models.spec import FamilySpec

UNCONDITIONAL = "unconditional"
PRIMARY = "validation"
SMALLEST_SIDE = 128
# Bytes. File systems allow 255, but step, size and suffix are appended.
LONGEST_NAME = 120

# The built-in `validation_prompt_library`: a person, a landscape, a style, a crowded scene, text.
BUILT_IN = {
    "portrait": "portrait of an old sailor with a grey beard, soft window light",
    "mountains": "a mountain lake at sunrise, mist over the water, snow on the peaks",
    "still_life": "oil painting of three lemons and a blue jug on a wooden table",
    "street": "a rainy street at night, neon signs, people with umbrellas",
    "poster": 'a poster with the word "HELLO" in large red letters',
}


@dataclass(frozen=True)
class ValidationPrompt:
    """A prompt of previews.

    Attributes:
        short_name: safe in a file name.
        nickname: the user's name for it.
    """

    short_name: str
    nickname: str
    prompt: str


def collect_prompts(config: ValidationConfig, report: Problems) -> list[ValidationPrompt]:
    """All prompts of the run, with unique names.

    The empty prompt comes first, if it is enabled or the only one, then libraries.
    """
    if config.validation_disable:
        return []
    library: list[tuple[str, str]] = []
    if config.validation_prompt_library:
        library += BUILT_IN.items()
    if config.user_prompt_library:
        library += read_library(Path(config.user_prompt_library).expanduser(), report)
    taken = {UNCONDITIONAL, PRIMARY}  # reserved; library prompts with these names are renamed
    prompts = []
    for nickname, prompt in library:
        short_name = unique(file_safe(nickname), taken)
        prompts.append(ValidationPrompt(short_name, nickname, prompt))
    if config.validation_prompt:
        # Last, since the model card shows `prompts[-1]`.
        prompts.append(ValidationPrompt(PRIMARY, PRIMARY, config.validation_prompt))
    omits_empty = config.validation_disable_unconditional
    if omits_empty is None:
        omits_empty = bool(prompts)
    if omits_empty:
        return prompts
    return [ValidationPrompt(UNCONDITIONAL, UNCONDITIONAL, ""), *prompts]


def read_library(path: Path, report: Problems) -> list[tuple[str, str]]:
    """Nicknames and prompts of a library file.

    A prompt may also be written as `{"prompt": ...}`, in which keys that begin with an underscore
    are comments.
    """
    key = "user_prompt_library"
    if not path.is_file():
        report.error(key, f"{str(path)!r} {why_no_file(path)}.")
        return []
    of_file = Problems()
    content = read_json(path, of_file)
    report.extend(of_file)
    if not isinstance(content, dict):
        if not of_file.are_fatal:
            report.error(
                key, f"{path} must hold one object of nickname to prompt, not {json_kind(content)}."
            )
        return []
    prompts = []
    for nickname, value in content.items():
        entry: dict[str, Any] = dict(value) if isinstance(value, dict) else {"prompt": value}
        if "adapter_strength" in entry:
            # Without validation_adapter_path it has nothing to act on, so it is not refused.
            del entry["adapter_strength"]
            report.warn(
                key,
                f"{path}: 'adapter_strength' of {nickname!r} was removed in {REMOVED_IN} with "
                "validation_adapter_path. It is ignored.",
            )
        fault = _fault(nickname, entry)
        if fault is not None:
            report.error(key, f"{path}: {fault}")
        else:
            prompts.append((nickname, entry["prompt"]))
    return prompts


def _fault(nickname: str, entry: dict[str, Any]) -> str | None:
    """What is wrong with an entry of a library, as the end of a message; None if nothing is."""
    unknown = [name for name in entry if name != "prompt" and not name.startswith("_")]
    if unknown:
        guess = did_you_mean(unknown[0], ["prompt"])
        return f"{unknown[0]!r} of {nickname!r} is not a known key (prompt).{guess}"
    prompt = entry.get("prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        return f"the prompt {nickname!r} is empty or not text."
    return None


def file_safe(name: str) -> str:
    """A nickname for file names: letters and digits of any script, dots, dashes, underscores."""
    kept = ""
    for char in name:
        # Letters, marks and numbers, see unicode.org/reports/tr44.
        is_safe = char in "._-" or unicodedata.category(char)[0] in "LMN"
        kept += char if is_safe else " "
    joined = re.sub(r"_*\s+_*", "_", kept.strip())
    # Cut between characters: `ignore` drops the beginning of one that is cut in two.
    cut = joined.encode()[:LONGEST_NAME].decode(errors="ignore")
    return cut.strip("._") or "prompt"


def fit_sizes(
    sizes: Sequence[Size], spec: FamilySpec, report: Problems, *, lenient: bool
) -> list[Size]:
    """The sizes of `validation_resolution`, rounded with a warning to what the model can render.

    A side under 128 px is an error, since it is usually meant as megapixels; `lenient`
    (`i_know_what_i_am_doing`) allows it.
    """
    key = "validation_resolution"
    multiple = spec.size_multiple
    rounded_sizes = []
    for width, height in sizes:
        rounded_sizes.append(Size(_rounded(width, multiple), _rounded(height, multiple)))
    remedy = {key: ",".join(map(str, rounded_sizes))}
    fitting = []
    for size, rounded in zip(sizes, rounded_sizes, strict=True):
        if min(size) < SMALLEST_SIDE and not lenient:
            report.error(
                key,
                f"{size} is smaller than {SMALLEST_SIDE} px; sizes are pixels, not megapixels. "
                "(i_know_what_i_am_doing allows it.)",
            )
            continue
        if rounded != size:
            message = f"{size} is not a multiple of {multiple} px; {rounded} is rendered."
            report.warn(key, message, remedy=remedy)
        if max(rounded) > spec.largest_side:
            report.error(key, f"{size} is larger than {spec.largest_side} px, the model's limit.")
        fitting.append(rounded)
    return fitting


def _rounded(side: int, multiple: int) -> int:
    """The multiple nearest to a side, at least one."""
    return max(multiple, round(side / multiple) * multiple)


def unique(name: str, taken: set[str]) -> str:
    """The name, numbered if already in `taken`; adds it to `taken`."""
    candidate = name
    number = 1
    # Some file systems are case-insensitive.
    while candidate.lower() in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken.add(candidate.lower())
    return candidate
