"""What a model family is, as plain data: readable without torch, before anything is downloaded.

A family is one folder under `models/` with a `spec.py` that fills in a `FamilySpec` and an adapter module that the
spec names. Whoever needs weights asks `registry.load_adapter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.load import FamilyOptions, RunConfig
from simpletuner.config.option import Group, Size
from simpletuner.config.schema import TextConfig
from simpletuner.errors import Problem
from simpletuner.models.cost_table import FamilyCost

if TYPE_CHECKING:
    from simpletuner.models.source import ModelSource

Task = Literal["t2i", "i2i", "t2v", "i2v"]


@dataclass(frozen=True)
class Flavour:
    """One published checkpoint of a family.

    Attributes:
        name: value of `model_flavour`.
        repository: hub id of the diffusers checkpoint.
        task: what goes in and what comes out.
        needs: what a user must bring beside captions, for the wizard; empty when nothing.
        dataset_task: what the same checkpoint does instead when a dataset asks for it (`video.is_i2v`), or None.
    """

    name: str
    repository: str
    task: Task
    needs: str = ""
    dataset_task: Task | None = None


@dataclass(frozen=True)
class Component:
    """A part of a diffusers checkpoint.

    Attributes:
        folder: where it lies.
        override: the config key that can replace it.
        kind: `model_type` in the config.json of a text encoder.
    """

    folder: str
    override: str | None = None
    kind: str | None = None


@dataclass(frozen=True)
class AutoShift:
    """`flow_schedule_auto_shift`: e^mu, mu linear in the tokens of a sample between two points, constant outside."""

    fewest_tokens: int = 256
    lowest_mu: float = 0.5
    most_tokens: int = 4096
    highest_mu: float = 1.15

    def __call__(self, tokens: int) -> float:
        share = (tokens - self.fewest_tokens) / (self.most_tokens - self.fewest_tokens)
        return math.exp(self.lowest_mu + (self.highest_mu - self.lowest_mu) * min(max(share, 0.0), 1.0))


@dataclass(frozen=True)
class FamilySpec:
    """Everything about a family that can be known without loading it.

    Attributes:
        name: value of `model_family`.
        flavours: the published checkpoints; the first is the default.
        adapter: `module:Class` of the adapter.
        options: the config keys that only this family, or a relative of it, has.
        defaults: family defaults by config key, laid over the global ones.
        fixed: what the family sets itself by config key; other values of the user are ignored with a warning.
        components: parts that a checkpoint must have, by their role.
        size_multiple: width and height of pictures must be multiples of this many pixels.
        vae_stride: pixels per latent position on each side.
        patch_size: latent positions per token on each side.
        largest_side: pixels a side where the model's position tables end.
        auto_shift: the shift that a number of tokens asks for, where `flow_schedule_auto_shift` is on.
        native_sizes: (width, height) of the sizes the model was trained at, by resolution.
        text_length_cap: longest caption in tokens that the family takes.
        lora_targets: modules that get a LoRA by default.
        lora_presets: named selections for `peft_lora_target_modules`; a text is a regular expression.
        quantised_layers: regular expression for the linear layers that a quantised base holds in few bits.
        license: of the published weights.
        in_comfyui: ComfyUI has the model, and calls its layers what diffusers calls them.
        token_blocks: entry of the transformer's config that counts the blocks that tokens can
            be routed past; None where they cannot.
        block_counts: entries of the transformer's config that count its blocks, by the group's name in weight files.
        grid: what width and height must be multiples of for a checkpoint, where that is more than `size_multiple`.
        frame_rate: frames per second that clips are trained and sampled at; None for families of pictures.
        frame_stride: frames per latent frame: F frames give (F - 1) / frame_stride + 1.
        slices_convolutions: the VAE's convolutions can run in slices of time (`vae_enable_patch_conv`).
        fast_blocks: the adapter has blocks of less work than those of diffusers.
        check: problems of a config that only this family knows of.
        check_sizes: hints about the sizes of use and those that are trained, by dataset id; None where any go together.
        check_checkpoint: problems of the parts of a checkpoint that are on this machine.
        clean_caption: what is done to a caption before it is encoded.
        dataset_keys: keys of datasets that only this family reads.
        dataset_caption: what the keys of a dataset add to a caption of it, None where none do.
        text_fingerprint: stands for the words around a caption; changes when they do.
        cost: shapes, FLOPs and bytes, for the plan.
        bare_fingerprint: the same for negative prompts and the empty caption, None where nothing differs.
        prompt_holds_picture: tasks whose prompt contains the source picture.
    """

    name: str
    title: str
    media: Literal["image", "video"]
    flavours: Sequence[Flavour]
    adapter: str
    options: type[Group]
    defaults: Mapping[str, Any]
    components: Mapping[str, Component]
    size_multiple: int
    vae_stride: int
    patch_size: int
    largest_side: int
    native_sizes: Mapping[int, Sequence[tuple[int, int]]]
    text_length_cap: int
    lora_targets: Sequence[str]
    lora_presets: Mapping[str, str]
    quantised_layers: str
    license: str
    check: Callable[[RunConfig, Flavour], list[Problem]]
    check_checkpoint: Callable[[Flavour, ModelSource], list[Problem]]
    clean_caption: Callable[[str], str]
    text_fingerprint: Callable[[FamilyOptions, Flavour], str]
    cost: FamilyCost
    bare_fingerprint: Callable[[FamilyOptions], str] | None = None
    dataset_caption: Callable[[DatasetConfig, str], str] | None = None
    dataset_keys: frozenset[str] = frozenset()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    prompt_holds_picture: frozenset[Task] = frozenset()
    block_counts: Mapping[str, str] = field(default_factory=dict)
    token_blocks: str | None = None
    grid: Callable[[Flavour, ModelSource], int] | None = None
    frame_rate: float | None = None
    frame_stride: int = 1
    slices_convolutions: bool = False
    fast_blocks: bool = False
    check_sizes: Callable[[RunConfig, Flavour, Sequence[Size], Mapping[str, Sequence[Size]]], list[Problem]] | None = (
        None
    )
    auto_shift: AutoShift = field(default_factory=AutoShift)
    in_comfyui: bool = False
    flavour_names: Sequence[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "flavour_names", [flavour.name for flavour in self.flavours])

    @property
    def media_noun(self) -> str:
        """What is trained on and rendered, as people call it."""
        return "clips" if self.media == "video" else "pictures"

    @property
    def text_encoders(self) -> int:
        """How many text encoders the family has."""
        return sum(role.startswith("text_encoder") for role in self.components)

    def flavour(self, name: str | None) -> Flavour:
        """The flavour of that name, or the default one.

        Raises:
            KeyError: there is no such flavour.
        """
        if name is None:
            return self.flavours[0]
        for flavour in self.flavours:
            if flavour.name == name:
                return flavour
        raise KeyError(name)

    def for_checkpoint(self, flavour: Flavour, source: ModelSource) -> FamilySpec:
        """This family with the pixel grid that a checkpoint needs."""
        multiple = self.grid(flavour, source) if self.grid else self.size_multiple
        if multiple == self.size_multiple:
            return self
        defaults = {**self.defaults, "aspect_bucket_alignment": str(multiple)}
        return replace(self, size_multiple=multiple, defaults=defaults)

    def text_length(self, text: TextConfig) -> int:
        """The longest caption in tokens that a run takes; longer ones are cut."""
        return min(text.tokenizer_max_length or self.text_length_cap, self.text_length_cap)

    def latent_size(self, width: int, height: int, frames: int) -> tuple[int, int, int]:
        """(frames, height, width) of the latents of a picture or clip of that size in pixels."""
        return (frames - 1) // self.frame_stride + 1, height // self.vae_stride, width // self.vae_stride

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Transformer tokens of latents of that size."""
        return frames * (height // self.patch_size) * (width // self.patch_size)
