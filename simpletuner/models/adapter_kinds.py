"""The kinds of adapter, for plan, budget and training.

Kinds other than LoRA are annexes: like the adapters of families, they are named here and imported
on use.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simpletuner.config.lora import LoraConfig
from simpletuner.config.schema import PLAIN_PRECISIONS, RunConfig
from simpletuner.errors import Problems
from simpletuner.models import lora_layers
from simpletuner.models.cost import Adapters
from simpletuner.models.lora_checks import check_init_lora
from simpletuner.models.lora_layers import Targets, matching_modules
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec, Flavour
from simpletuner.weights.files import Shapes


@dataclass(frozen=True)
class AdapterKind:
    """A value of `lora_type`.

    Attributes:
        add: `module:function` that freezes a transformer and adds the adapter: (transformer,
            settings, targets, family, seed=, dtype=) -> `Trained`. None for a LoRA, which is part
            of the core.
        numbers: (settings, family, targets, shapes) -> trained numbers by layer. None for a LoRA,
            which has a rank.
        layers: (settings, family, shapes, quantised) -> the layers selected by the kind's settings
            file, and the problems of that file. None if `peft_lora_target_modules` selects them.
        takes_any_rank: whether the rank may exceed the width of a layer.
        settings_file: the key of the kind's settings file, if any.
        no_slider: why its strength cannot be scaled; empty if it can.
    """

    add: str | None = None
    numbers: Callable[[LoraConfig, FamilySpec, Targets, Shapes], dict[str, int]] | None = None
    layers: Callable[[LoraConfig, FamilySpec, Shapes, bool, Problems], list[str]] | None = None
    takes_any_rank: bool = False
    settings_file: str = ""
    no_slider: str = ""


LORA = AdapterKind()
OTHERS = "simpletuner.annexes.adapters.kinds:KINDS"  # by value of `lora_type`


def adapter_kind(config: LoraConfig) -> AdapterKind:
    """The kind of adapter of a run."""
    if config.lora_type == "standard":
        return LORA
    return pkgutil.resolve_name(OTHERS)[config.lora_type]


def planned_adapters(
    config: LoraConfig, spec: FamilySpec, targets: Targets, shapes: Shapes
) -> Adapters:
    """The adapter that a config adds to a transformer."""
    numbers = adapter_kind(config).numbers
    if numbers is None:
        return Adapters(config.lora_rank, frozenset(matching_modules(shapes, targets)), {})
    products = numbers(config, spec, targets, shapes)
    return Adapters(config.lora_rank, frozenset(products), products)


def trained_layers(
    config: RunConfig, spec: FamilySpec, flavour: Flavour, source: ModelSource, report: Problems
) -> Targets:
    """The layers that get an adapter; reports problems of this selection and of `init_lora`."""
    value = "slider" if config.lora.slider_lora_target else config.lora.peft_lora_target_modules
    targets = lora_layers.resolve_targets(value, spec, report)
    if config.model.model_type != "lora":
        return targets
    # Old formats list their weights only on loading, and are checked then.
    part = source["transformer"]
    shapes: Shapes = part.weight_shapes()
    if part.local_folder() is None and part.location in (flavour.repository, flavour.base_model):
        shapes = spec.cost.published_shapes(flavour.name)  # so before it is downloaded
    kind = adapter_kind(config.lora)
    if kind.layers:
        quantised = config.precision.base_model_precision not in PLAIN_PRECISIONS
        return kind.layers(config.lora, spec, lora_layers.weights_of(shapes), quantised, report)
    modules = lora_layers.linear_modules(shapes)
    check_init_lora(config.lora, modules, targets, spec.name, report)
    if modules:
        lora_layers.check_targets(modules, targets, report)
    if not kind.takes_any_rank:
        _check_rank(config.lora.lora_rank, modules, targets, report)
    return targets


def _check_rank(
    rank: int, modules: Mapping[str, tuple[int, int]], targets: Targets, report: Problems
) -> None:
    """Warn of a rank above the narrower side of a weight, where it adds only parameters."""
    widths = [min(modules[name]) for name in matching_modules(modules, targets)]
    if widths and rank > min(widths):
        report.warn(
            "lora_rank", f"{rank} is more than the width of the narrowest layer ({min(widths)})."
        )
