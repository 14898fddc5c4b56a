"""The kinds of adapter, as plan, budget and training need them. Free of torch.

Kinds other than LoRA are annexes: like the adapters of families they are named here and imported when they are used.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simpletuner.config.lora import LoraConfig
from simpletuner.errors import Reading
from simpletuner.models.cost import Adapters, Shape
from simpletuner.models.lora_keys import Targets, matching_modules
from simpletuner.models.spec import FamilySpec

Shapes = Mapping[str, Shape]  # of the weights of a transformer's layers, by layer


@dataclass(frozen=True)
class AdapterKind:
    """A value of `lora_type`.

    Attributes:
        add: `module:function` that freezes a transformer and adds the adapter: (transformer, settings, targets, family,
            seed=, dtype=) -> `Trained`. None for a LoRA, which is part of the core.
        numbers: (settings, family, targets, shapes) -> trained numbers by layer. None for a LoRA, whose rank says them.
        layers: (settings, family, shapes, quantised) -> the layers that the kind's own file chooses, and the problems
            of that file. None where `peft_lora_target_modules` chooses them.
        takes_any_rank: also one above the width of a layer.
        settings_file: the key of the kind's own file, if it has one.
        no_slider: why its strength cannot be multiplied; empty if it can.
    """

    add: str | None = None
    numbers: Callable[[LoraConfig, FamilySpec, Targets, Shapes], dict[str, int]] | None = None
    layers: Callable[[LoraConfig, FamilySpec, Shapes, bool], Reading[list[str]]] | None = None
    takes_any_rank: bool = False
    settings_file: str = ""
    no_slider: str = ""


LORA = AdapterKind()
OTHERS = "simpletuner.annexes.adapters.kinds:KINDS"  # by value of `lora_type`


def adapter_kind(config: LoraConfig) -> AdapterKind:
    """The kind of adapter of a run."""
    kind: AdapterKind = LORA if config.lora_type == "standard" else pkgutil.resolve_name(OTHERS)[config.lora_type]
    return kind


def planned_adapters(config: LoraConfig, spec: FamilySpec, targets: Targets, shapes: Shapes) -> Adapters:
    """The adapter that a config adds to a transformer."""
    numbers = adapter_kind(config).numbers
    products = numbers(config, spec, targets, shapes) if numbers else {}
    return Adapters(config.lora_rank, frozenset(products if numbers else matching_modules(shapes, targets)), products)
