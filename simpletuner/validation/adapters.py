"""Further LoRAs for previews and samples. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from simpletuner.config.load import RunConfig, raise_if_fatal
from simpletuner.config.validation_adapters import check_listed
from simpletuner.errors import Problem
from simpletuner.models.lora_keys import (
    COMFYUI_MAGNITUDE,
    MAGNITUDE,
    check_lora_file,
    find_lora,
    linear_modules,
    read_shapes,
)
from simpletuner.models.source import ModelSource
from simpletuner.validation.prompts import ValidationPrompt, file_safe, unique

KEY = "validation_adapter_path"


@dataclass(frozen=True)
class AdapterRun:
    """LoRA files with strengths, rendered together; without files, the plain model.

    Attributes:
        name: added to the names of preview files.
    """

    name: str = ""
    loras: tuple[tuple[Path, float], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(path.stat().st_size for path, _ in self.loras)


def adapter_runs(config: RunConfig, *, fetch: bool = False) -> list[AdapterRun]:
    """The adapter runs of a round of previews; LoRAs that are not on this machine are skipped unless `fetch`.

    Raises:
        UserError: a file could not be downloaded.
    """
    adapters, taken = config.validation_adapters, set[str]()
    runs = [AdapterRun()] if adapters.renders_without else []
    for entry in adapters.entries:
        found = [(find_lora(location, fetch=fetch), strength) for location, strength in entry.loras]
        loras = tuple((path, strength) for path, strength in found if path is not None)
        runs.append(AdapterRun(unique(file_safe(entry.title), taken), loras))
    return runs


def check_adapters(
    config: RunConfig, family: str, source: ModelSource, prompts: Sequence[ValidationPrompt]
) -> Iterator[Problem]:
    """Problems of the files on this machine with the model, and of settings without effect."""
    yield from check_listed(config.validation_adapters)
    modules = linear_modules(source["transformer"].weight_shapes())
    files = dict.fromkeys(path for run in adapter_runs(config) for path, _ in run.loras)
    for path in files:
        yield from check_lora_file(KEY, path, modules, family)
        if any(name.endswith((MAGNITUDE, COMFYUI_MAGNITUDE)) for name in read_shapes(KEY, path, [])):
            message = "is a DoRA, which scales the base model's weights and cannot be added to one in training."
            yield Problem(KEY, f"{str(path)!r} {message} `simpletuner sample` renders with it.")
    if files and config.validation.validation_torch_compile:
        message = "and validation_adapter_* exclude each other: compiled blocks would not see the further LoRAs."
        yield Problem("validation_torch_compile", message)
    if not config.validation_adapters.entries:
        for prompt in [prompt for prompt in prompts if prompt.adapter_strength is not None]:
            message = f"the adapter_strength of {prompt.nickname!r} has no effect without validation_adapter_path."
            yield Problem("user_prompt_library", message, fatal=False)


def fetched_runs(config: RunConfig, family: str, source: ModelSource) -> list[AdapterRun]:
    """The adapter runs of a new session, after downloading and checking files of the hub.

    Raises:
        ConfigError: a downloaded file does not fit.
        UserError: a file could not be downloaded.
    """
    runs = adapter_runs(config, fetch=True)
    raise_if_fatal(list(check_adapters(config, family, source, ())))
    return runs
