"""The parts of a checkpoint together, and whether they fit each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from simpletuner.config.paths import home_path, missing_path, similar_path
from simpletuner.errors import Problems, shorten
from simpletuner.models.spec import FamilySpec, Flavour, OriginalWeights
from simpletuner.weights.files import Shape, Shapes
from simpletuner.weights.original import OriginalTransformer
from simpletuner.weights.part import HUB_ID, Part

MODEL_KEY = "pretrained_model_name_or_path"
VAE_KEY = "pretrained_vae_model_name_or_path"
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")  # model.language_model.layers.27.mlp.up_proj.weight


@dataclass(frozen=True)
class ModelSource:
    """The parts of a checkpoint by role, with the overrides of the configuration."""

    parts: dict[str, Part]

    @classmethod
    def from_settings(
        cls, spec: FamilySpec, flavour: Flavour, settings: Mapping[str, Any]
    ) -> ModelSource:
        """Parts at the configured base path, else in the flavour's repository, unless a key
        overrides them.

        Args:
            settings: values by key, such as `RunConfig.flat`; families have keys of their own for
                some parts.
        """
        base = _base(flavour, settings[MODEL_KEY])
        published = tuple(known.repository for known in spec.flavours)
        parts = {}
        for role, component in spec.components.items():
            folder = component.folder
            if role == "transformer":
                folder = settings["pretrained_transformer_subfolder"]
            key = MODEL_KEY
            location = base
            if component.override and settings[component.override]:
                key = component.override
                location = settings[key]
            parts[role] = Part(
                role, key, location, folder, settings["revision"], settings["variant"], published
            )
        if flavour.original and parts["transformer"].location == flavour.repository:
            parts["transformer"] = _original_transformer(parts["transformer"], flavour.original)
        return cls(parts)

    def with_transformer(self, part: Part | None) -> ModelSource:
        """The source with its transformer replaced, unless `part` is None."""
        return ModelSource({**self.parts, "transformer": part}) if part else self

    def __getitem__(self, role: str) -> Part:
        return self.parts[role]

    def check(self, report: Problems) -> bool:
        """Report unusable local folders and malformed hub ids; whether the files that are there can
        be read.

        Missing repositories show on download.
        """
        # One message per location, since most parts have the same.
        by_location: dict[str, list[Part]] = {}
        for part in self.parts.values():
            by_location.setdefault(part.location, []).append(part)
        faults = [
            (parts[0].key, _fault_at(location, parts)) for location, parts in by_location.items()
        ]
        for key, fault in faults:
            if fault is not None:
                report.error(key, fault)
        return all(fault is None for _, fault in faults)

    def check_names(self, report: Problems) -> None:
        """Warn about names of hub models that are probably misspelt folders."""
        keys = {part.location: part.key for part in self.parts.values()}
        for location, key in keys.items():
            folder = Path(location)
            if HUB_ID.fullmatch(location) and not folder.exists() and folder.parent.is_dir():
                message = f"there is no folder {location!r}, so it is taken for a model of the hub."
                report.warn(key, f"{message}{similar_path(folder, '*/')}")


def _fault_at(location: str, parts: Sequence[Part]) -> str | None:
    """Why the parts at a location cannot be used, or None."""
    if not parts[0].is_local:
        is_id = HUB_ID.fullmatch(location) is not None
        return None if is_id else f"{location!r} is neither an existing folder nor a valid hub id."
    if not home_path(location).is_dir():
        return f"the model folder {missing_path(home_path(location))}"
    unusable = []
    for part in parts:
        fault = part.fault()
        if fault is not None:
            unusable.append(f"{part.folder} ({fault})")
    return (
        f"the model folder {location!r} lacks a usable {', '.join(unusable)}." if unusable else None
    )


def _base(flavour: Flavour, given: str | None) -> str:
    """Where the parts are that no key overrides.

    The hub may not have the diffusers form of a transformer that is published in its original form,
    so its id stands for the flavour.
    """
    if flavour.original and given == flavour.original.diffusers_form:
        return flavour.repository
    return given or flavour.repository


def _original_transformer(related: Part, original: OriginalWeights) -> OriginalTransformer:
    return OriginalTransformer(
        role=related.role,
        key=related.key,
        location=original.repository,
        folder="",
        revision=related.revision,
        variant=None,
        published=(original.repository,),
        file=original.file,
        related=related,
        changes=original.config,
        diffusers_form=replace(related, location=original.diffusers_form),
    )


def check_channels(
    source: ModelSource, transformer_key: str, vae_key: str, report: Problems
) -> None:
    """Report different numbers of latent channels in transformer and VAE, by these keys; skips
    missing parts.
    """
    takes = (source["transformer"].read_config() or {}).get(transformer_key)
    makes = (source["vae"].read_config() or {}).get(vae_key)
    if takes != makes and None not in (takes, makes):
        report.error(VAE_KEY, f"the VAE has {makes} channels, the transformer {takes}.")


# Weights of a whole CLIP that are not part of its text encoder.
BESIDE_TEXT = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale")


def encoder_weights(part: Part) -> dict[str, Shape]:
    """The weights that are loaded as a text encoder; transformers skips the rest of a whole
    CLIP.
    """
    return {
        name: shape
        for name, shape in part.weight_shapes().items()
        if not name.startswith(BESIDE_TEXT)
    }


def encoder_fault(config: Mapping[str, Any], shapes: Shapes, tokens: int | None) -> str | None:
    """The mismatch of a text encoder's weights with its config or tokenizer, or None.

    Args:
        tokens: number of tokens of its tokenizer, if known. Embeddings have a few more rows, as
            padding.
    """
    inner = config.get("text_config")
    settings = {**config, **(inner if isinstance(inner, dict) else {})}
    return _fault_of_layers(settings, shapes) or _fault_of_embeddings(settings, shapes, tokens)


def _fault_of_layers(settings: Mapping[str, Any], shapes: Shapes) -> str | None:
    wanted = settings.get("num_hidden_layers")
    layers = {int(match[1]) for match in map(LAYER.search, shapes) if match}
    absent = sorted(set(range(wanted)) - layers) if isinstance(wanted, int) and layers else []
    numbers = shorten([str(number) for number in absent])
    return f"is incomplete: its files lack layers {numbers} of {wanted}" if absent else None


def _fault_of_embeddings(
    settings: Mapping[str, Any], shapes: Shapes, tokens: int | None
) -> str | None:
    size = [
        settings.get(key) for key in ("vocab_size", "hidden_size")
    ]  # None is the class's default
    for name, shape in shapes.items():
        if not name.endswith(("embed_tokens.weight", "token_embedding.weight")):
            continue
        if any(said not in (None, actual) for said, actual in zip(size, shape, strict=False)):
            return f"has {name} of {list(shape)}, its config.json {size}"
        # A vocabulary of less than half the rows belongs to another model, since padding adds only
        # a few rows.
        if tokens is not None and not shape[0] / 2 < tokens <= shape[0]:
            return f"has an embedding of {shape[0]} tokens, its tokenizer has {tokens}"
    return None


# Lower and upper limits of the numbers, or lists of numbers, that normalise latents; far beyond
# published VAEs, whose scales are 0.13 to 8.
LOWEST = {"scaling_factor": 1e-3, "latents_std": 1e-3, "shift_factor": -1e3, "latents_mean": -1e3}
LARGEST_SCALE = 1e3


def vae_fault(config: Mapping[str, Any]) -> str | None:
    """A value in a VAE's config that would corrupt all latents, or None. Missing values are the
    class's defaults.
    """
    for key, lowest in LOWEST.items():
        value: Any = config.get(key)
        if key not in config or (value is None and key != "scaling_factor"):
            continue
        form, numbers = (
            ("a list of numbers", value) if key.startswith("latents_") else ("a number", [value])
        )
        # `type`, since True is an int; NaN fails the comparison.
        are_numbers = isinstance(numbers, list) and all(
            type(number) in (int, float) for number in numbers
        )
        if not are_numbers or not all(lowest <= number <= LARGEST_SCALE for number in numbers):
            return (
                f"has {key} {repr(value)[:60]}, not {form} between {lowest:g} and {LARGEST_SCALE:g}"
            )
    return None


def blocks_of(group: str, shapes: Shapes) -> dict[int, dict[str, Shape]]:
    """Shapes of the weights of a group's blocks, by block number and by name within the block."""
    blocks: dict[int, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        number, dot, rest = name.removeprefix(f"{group}.").partition(".")
        if name.startswith(f"{group}.") and dot and number.isdecimal():
            blocks.setdefault(int(number), {})[rest] = shape
    return blocks


def differing_weights(group: str, blocks: Mapping[int, Shapes]) -> list[str]:
    """Weights missing in some blocks, or with a shape that differs from the majority."""
    everything = {name for block in blocks.values() for name in block}
    usual = {
        name: Counter(block[name] for block in blocks.values() if name in block)
        for name in everything
    }
    return sorted(
        f"{group}.{number}.{name}"
        for number, block in blocks.items()
        for name in everything
        if block.get(name) != usual[name].most_common(1)[0][0]
    )
