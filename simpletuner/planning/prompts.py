"""Prompts of previews: those of a run, their library, and the sizes that are rendered."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simpletuner.config.schema import ValidationConfig
from simpletuner.config.types import Size
from simpletuner.data.sample import Sample
from simpletuner.errors import Problem, Problems
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.prompt_library import (
    LIBRARY,
    LibraryPrompt,
    find_picture,
    read_library,
)

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
    """A prompt of previews; settings that are None are those of the run.

    Attributes:
        short_name: safe in a file name.
        nickname: the user's name for it.
        guidance: guidance scale.
        size: in place of all sizes of the run.
        picture: that its previews start from, in place of those of the run.
    """

    short_name: str
    nickname: str
    prompt: str
    seed: int | None = None
    guidance: float | None = None
    size: Size | None = None
    picture: Sample | None = None

    def sizes_among(self, of_run: Sequence[Size]) -> list[Size]:
        """The sizes at which it is rendered."""
        return [*of_run] if self.size is None else [self.size]


def collect_prompts(config: ValidationConfig, report: Problems) -> list[ValidationPrompt]:
    """All prompts of the run, with unique names.

    The empty prompt comes first, if it is enabled or the only one, then libraries.
    """
    if config.validation_disable:
        return []
    library: list[LibraryPrompt] = []
    if config.validation_prompt_library:
        library += [LibraryPrompt(name, prompt) for name, prompt in BUILT_IN.items()]
    path = config.user_prompt_library
    if path:
        library += read_library(Path(path).expanduser(), report)
    taken = {UNCONDITIONAL, PRIMARY}  # reserved; library prompts with these names are renamed
    prompts = []
    for entry in library:
        short_name = unique(file_safe(entry.nickname), taken)
        picture = None
        if path and entry.picture is not None:
            picture = find_picture(path, entry.nickname, entry.picture, report)
        prompts.append(
            ValidationPrompt(
                short_name,
                entry.nickname,
                entry.prompt,
                entry.seed,
                entry.guidance,
                entry.size,
                picture,
            )
        )
    if config.validation_prompt:
        # Last, since the model card shows `prompts[-1]`.
        prompts.append(ValidationPrompt(PRIMARY, PRIMARY, config.validation_prompt))
    omits_empty = config.validation_disable_unconditional
    if omits_empty is None:
        omits_empty = bool(prompts)
    if omits_empty:
        return prompts
    return [ValidationPrompt(UNCONDITIONAL, UNCONDITIONAL, ""), *prompts]


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


def fit_prompts(
    prompts: Sequence[ValidationPrompt],
    library: str | None,
    spec: FamilySpec,
    report: Problems,
    *,
    lenient: bool,
) -> list[ValidationPrompt]:
    """The prompts with sizes of their own rounded, as by `fit_sizes`.

    Args:
        library: path of the library file, for messages.
    """
    fitted = []
    for prompt in prompts:
        if prompt.size is None:
            fitted.append(prompt)
            continue
        of_size = Problems()
        sizes = fit_sizes([prompt.size], spec, of_size, lenient=lenient)
        for problem in of_size:
            report.append(of_prompt(problem, library, prompt, "resolution"))
        size = sizes[0] if sizes else None
        fitted.append(replace(prompt, size=size))
    return fitted


def of_prompt(problem: Problem, library: str | None, prompt: ValidationPrompt, key: str) -> Problem:
    """A problem of a setting of the run as one of a prompt; its remedy would set the run's."""
    message = f"{library}: {key!r} of {prompt.nickname!r}: {problem.message}"
    return Problem(LIBRARY, message, fatal=problem.fatal)


def like_those_of_run(
    prompts: Sequence[ValidationPrompt], of_run: Sequence[ValidationPrompt]
) -> list[ValidationPrompt]:
    """Prompts with the settings of the run's prompts of the same words."""
    by_words = {prompt.prompt: prompt for prompt in of_run}
    equipped = []
    for prompt in prompts:
        alike = by_words.get(prompt.prompt)
        if alike is not None:
            prompt = replace(alike, short_name=prompt.short_name, nickname=prompt.nickname)
        equipped.append(prompt)
    return equipped


def rendered_sizes(prompts: Sequence[ValidationPrompt], of_run: Sequence[Size]) -> list[Size]:
    """All sizes at which prompts are rendered, those of the run first."""
    if not prompts or any(prompt.size is None for prompt in prompts):
        sizes = [*of_run]
    else:
        sizes = []
    for prompt in prompts:
        if prompt.size is not None and prompt.size not in sizes:
            sizes.append(prompt.size)
    return sizes


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
