"""Which modules get a LoRA, decided from names alone: no weights, no torch.

A selection is a list of module names (each matches that module and every module whose dotted path ends with it) or
a regular expression that must match a whole path, the two forms that peft knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from simpletuner.config.json_files import read_json
from simpletuner.errors import Problem, did_you_mean
from simpletuner.models.source import tensor_shapes
from simpletuner.models.spec import FamilySpec

KEY = "peft_lora_target_modules"
Targets = list[str] | str


def resolve_targets(value: Any, spec: FamilySpec, problems: list[Problem]) -> Targets:
    """The selection that a value of `peft_lora_target_modules` means; the family's default for None."""
    if value is None:
        return list(spec.lora_targets)
    if isinstance(value, str) and value in spec.lora_presets:
        return spec.lora_presets[value]
    if isinstance(value, str):
        value = _read_list(value, spec, problems)
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        problems.append(Problem(KEY, f"{value!r} is not a list of module names."))
        return list(spec.lora_targets)
    return value


def matching_modules(modules: Iterable[str], targets: Targets) -> list[str]:
    """The modules that a selection picks."""
    if isinstance(targets, str):
        return [name for name in modules if re.fullmatch(targets, name)]
    return [name for name in modules if any(name == target or name.endswith(f".{target}") for target in targets)]


def check_targets(modules: Iterable[str], targets: Targets) -> list[Problem]:
    """Names of a list that match no module of the transformer, each with the nearest one that would."""
    modules = list(modules)
    if isinstance(targets, str):
        return [] if matching_modules(modules, targets) else [Problem(KEY, f"{targets!r} matches no module.")]
    endings = sorted({".".join(name.split(".")[-depth:]) for name in modules for depth in (1, 2)})
    return [
        Problem(KEY, f"{target!r} matches no module of the transformer.{did_you_mean(target, endings)}")
        for target in targets
        if not matching_modules(modules, [target])
    ]


def linear_modules(folder: Path) -> dict[str, tuple[int, int]]:
    """Linear layers of the model in a folder by name, with (out, in) features, read from safetensors headers.

    Layers with a two-dimensional weight are taken for linear; embeddings of the supported transformers are, too.
    """
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, shape in tensor_shapes(path).items():
            if name.endswith(".weight") and len(shape) == 2:
                shapes[name.removesuffix(".weight")] = (shape[0], shape[1])
    return shapes


def _read_list(value: str, spec: FamilySpec, problems: list[Problem]) -> Any:
    """A file with a JSON list, or a comma list of names."""
    if value.endswith(".json") or "/" in value:
        known = len(problems)
        content = read_json(Path(value), problems)
        return list(spec.lora_targets) if len(problems) > known and content is None else content
    return [name.strip() for name in value.split(",")]
