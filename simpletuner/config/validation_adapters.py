"""Further LoRAs in previews: the keys `validation_adapter_*`. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from simpletuner.config.option import Group, common, option, when
from simpletuner.config.values import Number, Text, TextList, parse_json_text
from simpletuner.errors import Problem

of_adapter = partial(option, requires=when("validation_adapter_path"))
Strength = Annotated[Number, Field(gt=0)]


def parse_runs(value: object) -> object:
    """The list of runs, also from `{"runs": [...]}`; a path alone stands for a run with it."""
    value = parse_json_text(value)
    if isinstance(value, dict) and value.keys() == {"runs"}:
        value = value["runs"]
    return [{"path": each} if isinstance(each, str) else each for each in value] if isinstance(value, list) else value


class Adapter(Group):
    """A LoRA of a run; its strength is that of the run unless given."""

    path: Text
    strength: Strength | None = None
    adapter_name: Text | None = None


class AdapterEntry(Group):
    """A run: previews with one or several LoRAs."""

    label: Text | None = None
    path: Text | None = None
    paths: TextList | None = None
    adapters: list[Adapter] | None = None
    strength: Strength = 1.0

    @property
    def loras(self) -> list[tuple[str, float]]:
        """The LoRAs of the run and their strengths."""
        plain = [*(self.paths or []), *([self.path] if self.path else [])]
        named = [(each.path, each.strength or self.strength) for each in self.adapters or []]
        return [*((path, self.strength) for path in plain), *named]

    @property
    def title(self) -> str:
        """The label, else the names of the LoRAs."""
        names = [each.adapter_name for each in self.adapters or [] if each.adapter_name]
        # `repo:file` and `folder/file.safetensors` are called by their file.
        return self.label or "_".join(names or [Path(path.rpartition(":")[2] or path).stem for path, _ in self.loras])


class ValidationAdapterConfig(Group):
    """Validation adapters"""

    validation_adapter_path: Text | None = common(
        None,
        "A LoRA for previews, on top of the model in training: a file, a folder, or `repo[:file]` on the hub.",
    )
    validation_adapter_name: Text | None = of_adapter(
        None, "Its name in the names of preview files.", default_note="the name of the file"
    )
    validation_adapter_strength: Number = of_adapter(1.0, "Its strength.", gt=0)
    validation_adapter_mode: Literal["adapter_only", "comparison", "none"] = option(
        "comparison",
        "comparison also renders without further LoRAs; adapter_only does not, unless validation_adapter_config lists "
        "runs; none ignores all of them.",
    )
    validation_adapter_config: Annotated[list[AdapterEntry], BeforeValidator(parse_runs)] | None = option(
        None,
        "More runs of previews, as a list: a path, or an object with `path`, `paths` or `adapters` (each with `path` "
        "and `strength`), `strength` and `label`.",
        form="JSON",
    )

    @property
    def entries(self) -> list[AdapterEntry]:
        """The runs with further LoRAs."""
        if self.validation_adapter_mode == "none":
            return []
        name, path = self.validation_adapter_name, self.validation_adapter_path
        single = [AdapterEntry(label=name, path=path, strength=self.validation_adapter_strength)] if path else []
        return [*single, *(self.validation_adapter_config or [])]

    @property
    def renders_without(self) -> bool:
        """Whether previews are also rendered without further LoRAs."""
        listed = self.validation_adapter_config is not None
        return not self.entries or self.validation_adapter_mode == "comparison" or listed


def check_listed(config: ValidationAdapterConfig) -> Iterator[Problem]:
    """Runs without a LoRA."""
    for index, entry in enumerate(config.validation_adapter_config or []):
        if not entry.loras:
            yield Problem(f"validation_adapter_config[{index}]", "names no LoRA; give it path, paths or adapters.")
