"""Locates the parts of a checkpoint and checks that they fit each other."""

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
from simpletuner.weights.part import HUB_ID, Part, hub_id_of

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
        """Locate every part: where its own key points, else at the base path or hub id.

        Args:
            settings: values by key, such as `RunConfig.flat`. The keys of some parts belong to the
                family's options.
        """
        base = _base(flavour, settings[MODEL_KEY])
        published = tuple(variant.repository for variant in spec.flavours)
        parts = {}
        for role, component in spec.components.items():
            folder = component.folder
            overrides: Mapping[str, object] = {}
            if role == "transformer":
                folder = settings["pretrained_transformer_subfolder"]
                overrides = spec.transformer_overrides(settings)
            key = MODEL_KEY
            location = base
            if component.override and settings[component.override]:
                key = component.override
                location = settings[key]
            parts[role] = Part(
                role=role,
                key=key,
                location=location,
                folder=folder,
                revision=settings["revision"],
                variant=settings["variant"],
                published=published,
                overrides=overrides,
            )
        transformer = parts["transformer"]
        if flavour.original and transformer.location == flavour.repository:
            parts["transformer"] = _original_transformer(transformer, flavour.original)
        return cls(parts)

    def with_transformer(self, part: Part | None) -> ModelSource:
        """The source with its transformer replaced, unless `part` is None.

        What the run replaces in the transformer's config.json stays.
        """
        if part is None:
            return self
        part = replace(part, overrides=self["transformer"].overrides)
        return ModelSource({**self.parts, "transformer": part})

    def __getitem__(self, role: str) -> Part:
        return self.parts[role]

    def check(self, report: Problems) -> bool:
        """Report unusable local folders and malformed hub ids.

        Whether a repository exists shows only on download.

        Returns:
            whether there was nothing to report, so that local files can be read.
        """
        # One message per location, since most parts have the same.
        by_location: dict[str, list[Part]] = {}
        for part in self.parts.values():
            by_location.setdefault(part.location, []).append(part)

        is_usable = True
        for location, parts in by_location.items():
            fault = _fault_at(location, parts)
            if fault is not None:
                report.error(parts[0].key, fault)
                is_usable = False
        return is_usable

    def check_names(self, report: Problems) -> None:
        """Warn about names of hub models that are probably misspelt folders."""
        keys = {part.location: part.key for part in self.parts.values()}
        for location, key in keys.items():
            folder = Path(location)
            if HUB_ID.fullmatch(location) and not folder.exists() and folder.parent.is_dir():
                report.warn(
                    key,
                    f"there is no folder {location!r}, so it is treated as a Hugging Face model id."
                    f"{similar_path(folder, '*/')}",
                )


def _fault_at(location: str, parts: Sequence[Part]) -> str | None:
    """Why the parts at a location cannot be used, or None."""
    if not parts[0].is_local:
        if location.endswith(".safetensors"):
            return f"{location!r} is a file; name a model folder, or a hub id (owner/name)."
        if HUB_ID.fullmatch(location):
            return None
        return f"{location!r} is neither an existing folder nor a valid hub id."
    hub_id = hub_id_of(location)
    if hub_id:
        return f"{location!r} is the address of a page; set {hub_id!r}, the hub id."
    if "://" in location:
        return f"{location!r} is an address; name a model folder, or a hub id (owner/name)."
    if not home_path(location).is_dir():
        return f"the model folder {missing_path(home_path(location))}"
    unusable = []
    for part in parts:
        fault = part.fault()
        if fault is not None:
            unusable.append(f"{part.folder} ({fault})")
    if not unusable:
        return None
    return f"the model folder {location!r} lacks a usable {', '.join(unusable)}."


def _base(flavour: Flavour, location: str | None) -> str:
    """The base path or hub id, where all parts are that no key overrides.

    The hub may lack the diffusers form of a transformer that was published in its original form. A
    user may name it nevertheless, and means the flavour.
    """
    if flavour.original and location == flavour.original.diffusers_form:
        return flavour.repository
    return location or flavour.repository


def _original_transformer(related: Part, original: OriginalWeights) -> OriginalTransformer:
    """The transformer in its original file, configured by the related checkpoint's folder."""
    return OriginalTransformer(
        role=related.role,
        key=related.key,
        location=original.repository,
        folder="",
        revision=related.revision,
        variant=None,
        published=(original.repository,),
        overrides=related.overrides,
        file=original.file,
        related=related,
        changes=original.config,
        diffusers_form=replace(related, location=original.diffusers_form),
    )


def check_channels(
    source: ModelSource, transformer_key: str, vae_key: str, report: Problems
) -> None:
    """Report a transformer and a VAE whose latents have different numbers of channels.

    Args:
        transformer_key, vae_key: keys in their config.json. Without either, nothing is reported.
    """
    transformer_config = source["transformer"].read_config() or {}
    vae_config = source["vae"].read_config() or {}
    transformer_channels = transformer_config.get(transformer_key)
    vae_channels = vae_config.get(vae_key)
    if transformer_channels is None or vae_channels is None:
        return
    if transformer_channels != vae_channels:
        report.error(
            VAE_KEY,
            f"the VAE has {vae_channels} channels, the transformer {transformer_channels}.",
        )


# Weights of a whole CLIP that are not part of its text encoder.
BESIDE_TEXT = ("vision_model.", "visual_projection.", "text_projection.", "logit_scale")


def encoder_weights(part: Part) -> dict[str, Shape]:
    """The weights loaded as a text encoder; transformers skips the rest of a whole CLIP."""
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
    settings = dict(config)
    text_config = config.get("text_config")  # of a model that also reads pictures
    if isinstance(text_config, dict):
        settings |= text_config
    return _fault_of_layers(settings, shapes) or _fault_of_embeddings(settings, shapes, tokens)


def _fault_of_layers(settings: Mapping[str, Any], shapes: Shapes) -> str | None:
    """The layers that its files lack, or None."""
    count = settings.get("num_hidden_layers")
    matches = [LAYER.search(name) for name in shapes]
    layers = {int(match[1]) for match in matches if match is not None}
    if not isinstance(count, int) or not layers:
        return None  # nothing to compare
    absent = sorted(set(range(count)) - layers)
    if not absent:
        return None
    numbers = shorten([str(number) for number in absent])
    return f"is incomplete: its files lack layers {numbers} of {count}"


def _fault_of_embeddings(
    settings: Mapping[str, Any], shapes: Shapes, tokens: int | None
) -> str | None:
    """The mismatch of the token embedding with config.json or tokenizer, or None."""
    # None where config.json leaves the default of the class.
    size = [settings.get("vocab_size"), settings.get("hidden_size")]
    for name, shape in shapes.items():
        if not name.endswith(("embed_tokens.weight", "token_embedding.weight")):
            continue
        pairs = zip(size, shape, strict=False)
        if any(expected not in (None, actual) for expected, actual in pairs):
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
    """A value in a VAE's config that would corrupt all latents, or None.

    A missing value is the default of the class, and so is null, except for `scaling_factor`.
    """
    for key, lowest in LOWEST.items():
        if key not in config:
            continue
        value: Any = config[key]
        if value is None and key != "scaling_factor":
            continue
        if key.startswith("latents_"):
            form = "a list of numbers"
            numbers = value
        else:
            form = "a number"
            numbers = [value]
        if not _are_between(numbers, lowest, LARGEST_SCALE):
            return (
                f"has {key} {repr(value)[:60]}, not {form} between {lowest:g} and {LARGEST_SCALE:g}"
            )
    return None


def _are_between(numbers: Any, lowest: float, largest: float) -> bool:
    """Whether a JSON value is a list of finite numbers within these limits."""
    if not isinstance(numbers, list):
        return False
    for number in numbers:
        # Not `isinstance`, since True is an int. NaN fails the comparison.
        if type(number) not in (int, float) or not lowest <= number <= largest:
            return False
    return True


def blocks_of(group: str, shapes: Shapes) -> dict[int, dict[str, Shape]]:
    """Shapes of the weights of a group's blocks, by block number and by name within the block."""
    blocks: dict[int, dict[str, Shape]] = {}
    prefix = f"{group}."
    for name, shape in shapes.items():
        if not name.startswith(prefix):
            continue
        number, dot, rest = name.removeprefix(prefix).partition(".")
        if dot and number.isdecimal():
            blocks.setdefault(int(number), {})[rest] = shape
    return blocks


def differing_weights(group: str, blocks: Mapping[int, Shapes]) -> list[str]:
    """Weights missing in some blocks, or with a shape that differs from the majority."""
    counts: dict[str, Counter[Shape]] = {}
    for block in blocks.values():
        for name, shape in block.items():
            counts.setdefault(name, Counter())[shape] += 1

    differing = []
    for name, shapes in counts.items():
        usual_shape, _ = shapes.most_common(1)[0]
        for number, block in blocks.items():
            if block.get(name) != usual_shape:
                differing.append(f"{group}.{number}.{name}")
    return sorted(differing)
