"""The layers that a LoRA trains.

A selection has one of peft's two forms: a list of module names, each matching modules whose dotted
path equals or ends with it, or a regular expression that must match the whole path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from simpletuner.config.json_reader import read_json
from simpletuner.errors import Problems, did_you_mean
from simpletuner.models.spec import FamilySpec
from simpletuner.weights.files import Shape, Shapes

LORA_TARGETS = "peft_lora_target_modules"
Targets = list[str] | str


def resolve_targets(value: Any, spec: FamilySpec, report: Problems) -> Targets:
    """Resolve a value of `peft_lora_target_modules`; None means the family's default."""
    if isinstance(value, str):
        if value in spec.lora_presets:
            return spec.lora_presets[value]
        if value.endswith(".json") or "/" in value:
            value = read_json(Path(value), report, list, "a JSON list of module names")
        else:
            value = [name.strip() for name in value.split(",")]
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    if value and is_list:
        return value
    if value is not None:
        report.error(LORA_TARGETS, f"{value!r} is not a list of module names.")
    return list(spec.lora_targets)


def matching_modules(modules: Iterable[str], targets: Targets) -> list[str]:
    """The modules that a selection matches."""
    if isinstance(targets, str):
        return [name for name in modules if re.fullmatch(targets, name)]
    # With leading dots, only whole names match: `to_q` does not match `add_to_q`.
    endings = tuple(f".{target}" for target in targets)
    return [name for name in modules if f".{name}".endswith(endings)]


def check_targets(modules: Iterable[str], targets: Targets, report: Problems) -> None:
    """Report names that match no module of the transformer, with the nearest names that do."""
    modules = list(modules)
    if isinstance(targets, str):
        if not matching_modules(modules, targets):
            report.error(LORA_TARGETS, f"{targets!r} matches no module.")
        return
    # The last one or two parts of a path: `to_q`, `attn1.to_q`, `to_out.0`.
    endings = set()
    for name in modules:
        parts = name.split(".")
        endings.add(parts[-1])
        endings.add(".".join(parts[-2:]))
    for target in targets:
        if not matching_modules(modules, [target]):
            suggestion = did_you_mean(target, sorted(endings))
            report.error(
                LORA_TARGETS, f"{target!r} matches no module of the transformer.{suggestion}"
            )


def weights_of(shapes: Shapes) -> dict[str, Shape]:
    """Shapes of the weights with at least two dimensions, by layer."""
    return {name.removesuffix(".weight"): shape for name, shape in shapes.items() if len(shape) > 1}


def linear_modules(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """(out, in) features of linear layers and pointwise convolutions, by name.

    Every two-dimensional weight, even of an embedding, counts as a linear layer.
    """
    modules = {}
    for name, shape in shapes.items():
        is_matrix = len(shape) == 2 or shape[2:] == (1, 1)
        if name.endswith(".weight") and is_matrix:
            modules[name.removesuffix(".weight")] = (shape[0], shape[1])
    return modules
