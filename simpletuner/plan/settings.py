"""Where every road to a plan begins: layers of settings, the family that they name, its flavour and its checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.load import Layer, canonical, resolve, with_family
from simpletuner.config.schema import RunConfig
from simpletuner.config.sources import Arguments, locate
from simpletuner.errors import Problem, Reading, did_you_mean, result_of
from simpletuner.models.registry import FAMILIES, canonical_family_name
from simpletuner.models.source import ModelSource
from simpletuner.models.spec import FamilySpec, Flavour

# What a plan is for: a run, pictures from its result, a look at the datasets, or a form that is being filled in.
Purpose = Literal["train", "sample", "survey", "draft"]


@dataclass(frozen=True)
class Settings:
    """All keys of a run and the model that they name, before any file of a dataset is read."""

    config: RunConfig
    spec: FamilySpec
    flavour: Flavour
    source: ModelSource

    @classmethod
    def of(cls, config: RunConfig, spec: FamilySpec, flavour: Flavour, source: ModelSource | None = None) -> Settings:
        """With the pixel grid that the checkpoint needs, unless the user set one.

        Args:
            source: the parts of the model; by default those that the settings name.
        """
        source = source or ModelSource.from_config(spec, flavour, config)
        spec = spec.for_checkpoint(flavour, source)
        if not config.is_explicit("aspect_bucket_alignment"):
            # Written into the config, since datasets take what they leave unset from it.
            grid = {"aspect_bucket_alignment": spec.defaults["aspect_bucket_alignment"]}
            config = replace(config, datasets=config.datasets.model_copy(update=grid))
        return cls(config, spec, flavour, source)


def read_layers(arguments: Arguments) -> Reading[tuple[list[Layer], Path]]:
    """The layers of files, environment and command line, the weakest first, and the folder of the config file."""
    located = yield from locate(arguments.selectors)
    extended = yield from arguments.extended(located.extra_arguments)
    return [*located.layers, extended.layer()], located.folder


def resolve_layers(layers: Sequence[Layer]) -> Reading[tuple[RunConfig, FamilySpec | None]]:
    """The settings with the defaults of the family that they name; None if it is unknown."""
    spec = yield from find_family(layers)
    config = yield from resolve(with_family(layers, spec.defaults, spec.fixed) if spec else layers)
    return config, spec


def find_family(layers: Sequence[Layer]) -> Reading[FamilySpec | None]:
    """The family named by the layer with the highest precedence, which is the last one, as its flavour has it."""
    # Family and flavour may come from different layers.
    named: dict[str, str] = {}
    for layer in layers:
        # resolve() reports the problems, and a missing family.
        named |= {key: str(value) for key, value in result_of(canonical(layer)).items() if value is not None}
    if "model_family" not in named:
        return None
    name = canonical_family_name(named["model_family"])
    if name in FAMILIES:
        return FAMILIES[name].for_flavour(named.get("model_flavour"))
    message = f"{named['model_family']!r} is not one of: {', '.join(FAMILIES)}.{did_you_mean(name, FAMILIES)}"
    yield Problem("model_family", message)
    return None


def find_flavour(config: RunConfig, spec: FamilySpec) -> Reading[Flavour]:
    """The flavour that the settings name; the default one in place of an unknown name."""
    name, names = config.model.model_flavour, spec.flavour_names
    if name is None or name in names:
        return spec.flavour(name)
    message = f"{name!r} is not one of: {', '.join(names)}.{did_you_mean(name, names)}"
    yield Problem("model_flavour", f"{message} For another checkpoint set pretrained_model_name_or_path.")
    return spec.flavours[0]


def settle_task(flavour: Flavour, entries: Sequence[DatasetConfig]) -> tuple[Flavour, list[DatasetConfig]]:
    """The flavour with the task that the datasets select, and the datasets with `is_i2v` resolved.

    Only a flavour with a `dataset_task` has a choice: it takes that task as soon as one trained dataset sets
    `video.is_i2v`. The other datasets of the run are still trained from noise alone.
    """
    if flavour.dataset_task is None:
        return flavour, list(entries)
    if any(entry.is_trained and entry.video.is_i2v for entry in entries):
        flavour = replace(flavour, task=flavour.dataset_task)
    return flavour, [_resolve_i2v(entry) for entry in entries]


def _resolve_i2v(entry: DatasetConfig) -> DatasetConfig:
    if not entry.holds_clips:
        return entry
    # Unset becomes false: with a `dataset_task`, clips are trained from noise unless they say otherwise.
    video = entry.video.model_copy(update={"is_i2v": bool(entry.video.is_i2v)})
    return entry.model_copy(update={"video": video})
