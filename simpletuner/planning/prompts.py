"""Validation prompts, their file names and sizes. Imports no torch."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.config.lora import check_listed
from simpletuner.config.schema import RunConfig, ValidationConfig
from simpletuner.config.values import Size, json_kind, no_file, read_json
from simpletuner.errors import Problem, Problems, Reading, did_you_mean, result_of
from simpletuner.models import lora_checks, lora_layers
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec
from simpletuner.weights import lora_names
from simpletuner.weights.published_lora import find_lora

UNCONDITIONAL = "unconditional"
PRIMARY = "validation"
SMALLEST_SIDE = 128
# Bytes. File systems allow 255, but step, size and suffix are appended.
LONGEST_NAME = 120
LIBRARY_KEYS = ("prompt", "adapter_strength")

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
    """One prompt; `short_name` is safe in a file name, `nickname` is the user's name.

    `adapter_strength` replaces the strength of `validation_adapter_*` for this prompt.
    """

    short_name: str
    nickname: str
    prompt: str
    adapter_strength: float | None = None


def collect_prompts(config: ValidationConfig) -> Reading[list[ValidationPrompt]]:
    """All prompts of the run, with unique names: the empty prompt if enabled or the only one, libraries, then the
    primary prompt."""
    if config.validation_disable:
        return []
    built_in = BUILT_IN if config.validation_prompt_library else {}
    library: list[tuple[str, str, float | None]] = [(nickname, prompt, None) for nickname, prompt in built_in.items()]
    if config.user_prompt_library:
        library += yield from read_library(Path(config.user_prompt_library).expanduser())
    taken = {UNCONDITIONAL, PRIMARY}  # reserved; library prompts with these names are renamed
    named = [ValidationPrompt(unique(file_safe(entry[0]), taken), *entry) for entry in library]
    primary = [ValidationPrompt(PRIMARY, PRIMARY, config.validation_prompt)] if config.validation_prompt else []
    # The primary prompt comes last, since the model card shows `prompts[-1]`.
    prompts = [*named, *primary]
    omitted = config.validation_disable_unconditional
    omitted = bool(prompts) if omitted is None else omitted
    return prompts if omitted else [ValidationPrompt(UNCONDITIONAL, UNCONDITIONAL, ""), *prompts]


def read_library(path: Path) -> Reading[list[tuple[str, str, float | None]]]:
    """Nicknames, prompts and adapter strengths of a library file.

    A prompt may also be written as `{"prompt": ..., "adapter_strength": ...}`, in which keys that begin with an
    underscore are comments.
    """
    key = "user_prompt_library"
    if not path.is_file():
        yield Problem(key, f"{str(path)!r} {no_file(path)}.")
        return []
    problems = Problems()
    content = problems.take(read_json(path))
    yield from problems
    if not isinstance(content, dict):
        if not problems.are_fatal:
            yield Problem(key, f"{path} must hold one object of nickname to prompt, not {json_kind(content)}.")
        return []
    prompts = []
    for nickname, value in content.items():
        entry: dict[str, Any] = value if isinstance(value, dict) else {"prompt": value}
        faults = list(_faults(nickname, entry))
        yield from (Problem(key, f"{path}: {fault}") for fault in faults)
        if not faults:
            prompts.append((nickname, entry["prompt"], entry.get("adapter_strength")))
    return prompts


def _faults(nickname: str, entry: dict[str, Any]) -> Iterator[str]:
    """What is wrong with an entry of a library, as the end of a message."""
    unknown = [name for name in entry if name not in LIBRARY_KEYS and not name.startswith("_")]
    if unknown:
        guess = did_you_mean(unknown[0], LIBRARY_KEYS)
        yield f"{unknown[0]!r} of {nickname!r} is not a known key ({', '.join(LIBRARY_KEYS)}).{guess}"
        return
    prompt = entry.get("prompt")
    strength = entry.get("adapter_strength")
    if not isinstance(prompt, str) or not prompt.strip():
        yield f"the prompt {nickname!r} is empty or not text."
    elif strength is not None and not (isinstance(strength, int | float) and 0 < strength < math.inf):
        yield f"adapter_strength {strength!r} of {nickname!r} is not a number above 0."


def file_safe(name: str) -> str:
    """A nickname for use in file names: letters, marks and digits of any script, dots, dashes and underscores."""
    kept = "".join(char if char in "._-" or unicodedata.category(char)[0] in "LMN" else " " for char in name)
    whole = re.sub(r"_*\s+_*", "_", kept.strip())
    return whole.encode()[:LONGEST_NAME].decode(errors="ignore").strip("._") or "prompt"  # cut between characters


def fit_sizes(sizes: Sequence[Size], spec: FamilySpec, *, lenient: bool) -> Reading[list[Size]]:
    """Round the sizes of `validation_resolution` to multiples that the model can render, with a warning.

    A side under 128 px is an error, since it is usually meant as megapixels; `lenient` (`i_know_what_i_am_doing`)
    allows it.
    """
    key, multiple = "validation_resolution", spec.size_multiple
    sides = [[max(multiple, round(side / multiple) * multiple) for side in size] for size in sizes]
    rounded = [(width, height) for width, height in sides]
    remedy = {key: ",".join(f"{width}x{height}" for width, height in rounded)}
    fitting = []
    for (width, height), snapped in zip(sizes, rounded, strict=True):
        shown = f"{width}x{height}"
        if min(width, height) < SMALLEST_SIDE and not lenient:
            message = f"{shown} is smaller than {SMALLEST_SIDE} px; sizes are pixels, not megapixels."
            yield Problem(key, f"{message} (i_know_what_i_am_doing allows it.)")
            continue
        if snapped != (width, height):
            message = f"{shown} is not a multiple of {multiple} px; {snapped[0]}x{snapped[1]} is rendered."
            yield Problem(key, message, fatal=False, remedy=remedy)
        if max(snapped) > spec.largest_side:
            yield Problem(key, f"{shown} is larger than {spec.largest_side} px, the model's limit.")
        fitting.append(snapped)
    return fitting


def unique(name: str, taken: set[str]) -> str:
    """The name, numbered if already in `taken`; adds it to `taken`."""
    candidate, number = name, 1
    # Some file systems are case-insensitive.
    while candidate.lower() in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken.add(candidate.lower())
    return candidate


ADAPTER_PATH = "validation_adapter_path"


@dataclass(frozen=True)
class AdapterRun:
    """LoRA files with strengths, rendered together; without files, the plain model.

    Attributes:
        name: appended to preview file names.
    """

    name: str = ""
    loras: tuple[tuple[Path, float], ...] = ()

    @property
    def size(self) -> int:
        """Total bytes of the files."""
        # Missing files are reported separately.
        return sum(path.stat().st_size for path, _ in self.loras if path.is_file())


def adapter_runs(config: RunConfig, *, fetch: bool = False) -> list[AdapterRun]:
    """The adapter runs of a round of previews; without `fetch`, LoRAs that are not on this machine are skipped.

    Raises:
        UserError: a file could not be downloaded.
    """
    adapters, taken = config.validation_adapters, set[str]()
    runs = [AdapterRun()] if adapters.renders_without else []
    for entry in adapters.entries:
        files = [(find_lora(location, fetch=fetch), strength) for location, strength in entry.loras]
        loras = tuple((path, strength) for path, strength in files if path is not None)
        runs.append(AdapterRun(unique(file_safe(entry.title), taken), loras))
    return runs


def check_adapters(
    config: RunConfig, family: str, source: ModelSource, prompts: Sequence[ValidationPrompt]
) -> Iterator[Problem]:
    """Report files on this machine that do not fit the model, and settings without effect."""
    yield from check_listed(config.validation_adapters)
    modules = lora_layers.linear_modules(source["transformer"].weight_shapes())
    # Every file once, however many runs use it.
    files = dict.fromkeys(path for run in adapter_runs(config) for path, _ in run.loras)
    for path in files:
        yield from lora_checks.check_lora_file(ADAPTER_PATH, path, modules, family)
        names = result_of(lora_checks.read_shapes(ADAPTER_PATH, path))
        if any(name.endswith((lora_names.MAGNITUDE, lora_names.COMFYUI_MAGNITUDE)) for name in names):
            message = "is a DoRA, which scales the base model's weights and cannot be added to a model in training."
            yield Problem(ADAPTER_PATH, f"{str(path)!r} {message} `simpletuner sample` renders with it.")
    if files and config.validation.validation_torch_compile:
        message = "cannot be combined with validation_adapter_*: compiled blocks would skip the further LoRAs."
        yield Problem("validation_torch_compile", message)
    if not config.validation_adapters.entries:
        for prompt in [prompt for prompt in prompts if prompt.adapter_strength is not None]:
            message = f"the adapter_strength of {prompt.nickname!r} has no effect without validation_adapter_path."
            yield Problem("user_prompt_library", message, fatal=False)


def fetched_runs(config: RunConfig, family: str, source: ModelSource) -> list[AdapterRun]:
    """The adapter runs of a new session; downloads and checks files from the hub.

    Raises:
        ConfigError: a downloaded file does not fit.
        UserError: a file could not be downloaded.
    """
    runs = adapter_runs(config, fetch=True)
    # The plan could not check files that were still on the hub.
    Problems(check_adapters(config, family, source, ())).raise_if_fatal()
    return runs
