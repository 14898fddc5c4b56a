"""Which modules get a LoRA, decided by name. Free of torch.

A selection has one of peft's two forms: a list of module names, each matching the modules whose dotted path is or ends
with it, or a regular expression that must match the whole path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from simpletuner.config.json_files import read_json
from simpletuner.errors import Problem, did_you_mean
from simpletuner.models.spec import FamilySpec

KEY = "peft_lora_target_modules"
Targets = list[str] | str


def resolve_targets(value: Any, spec: FamilySpec, problems: list[Problem]) -> Targets:
    """Resolve a value of `peft_lora_target_modules`; None is the family's default."""
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
    """The modules that a selection matches."""
    if isinstance(targets, str):
        return [name for name in modules if re.fullmatch(targets, name)]
    endings = tuple(f".{target}" for target in targets)
    return [name for name in modules if f".{name}".endswith(endings)]


def check_targets(modules: Iterable[str], targets: Targets) -> list[Problem]:
    """Problems of names that match no module of the transformer, with the nearest names that do."""
    modules = list(modules)
    if isinstance(targets, str):
        return [] if matching_modules(modules, targets) else [Problem(KEY, f"{targets!r} matches no module.")]
    endings = sorted({".".join(name.split(".")[-depth:]) for name in modules for depth in (1, 2)})
    return [
        Problem(KEY, f"{target!r} matches no module of the transformer.{did_you_mean(target, endings)}")
        for target in targets
        if not matching_modules(modules, [target])
    ]


def weights_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Shapes of weights with at least two dimensions, by layer, among parameters with these shapes."""
    return {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) > 1}


def linear_modules(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Linear layers and pointwise convolutions by name, with (out, in) features, among parameters with these shapes.

    Every two-dimensional weight, even of an embedding, counts as a linear layer.
    """
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if name.endswith(".weight") and (len(shape) == 2 or shape[2:] == (1, 1))
    }


def _read_list(value: str, spec: FamilySpec, problems: list[Problem]) -> Any:
    """The content of a JSON file, or the names of a comma-separated list."""
    if value.endswith(".json") or "/" in value:
        known = len(problems)
        content = read_json(Path(value), problems)
        return list(spec.lora_targets) if len(problems) > known and content is None else content
    return [name.strip() for name in value.split(",")]
