"""Describes a model family as plain data, readable without torch and before anything is downloaded.

A family is a folder under `models/` with a `spec.py` that defines a `FamilySpec`, and the adapter
module that the spec names. Code that needs weights calls `adapter.load_adapter`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.option import Group
from simpletuner.config.schema import FamilyOptions, RunConfig, TextConfig
from simpletuner.config.types import Size
from simpletuner.errors import Problems
from simpletuner.models.cost import FamilyCost

if TYPE_CHECKING:
    from simpletuner.models.source import ModelSource

Task = Literal["t2i", "i2i", "t2v", "i2v"]
PICTURE_TASKS: tuple[Task, ...] = ("i2i", "i2v")  # that start from a picture


@dataclass(frozen=True)
class OriginalWeights:
    """A transformer published as one file, whose weights have diffusers' names and shapes.

    Attributes:
        repository: hub id of the file.
        file: its path there.
        diffusers_form: hub id of the same checkpoint in diffusers' form, which may not exist yet.
        config: values of its config.json that differ from those of the flavour's repository.
    """

    repository: str
    file: str
    diffusers_form: str
    config: Mapping[str, object]


@dataclass(frozen=True)
class Flavour:
    """One published checkpoint of a family.

    Attributes:
        name: value of `model_flavour`.
        repository: hub id of the diffusers checkpoint.
        original: the transformer, if it is not in that repository.
        task: input and output.
        needs: required data besides captions, for the wizard; may be empty.
        dataset_task: the task of this checkpoint on datasets that select it (`video.is_i2v`), or
            None.
        defaults: defaults of config keys that differ from the family's.
        changes: fields of the family's `FamilySpec` that differ for this checkpoint.
        distilled: whether it is distilled to sample without guidance.
    """

    name: str
    repository: str
    task: Task
    needs: str = ""
    dataset_task: Task | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    distilled: bool = False
    original: OriginalWeights | None = None

    @property
    def base_model(self) -> str:
        """Hub id of the trained transformer."""
        return self.original.repository if self.original else self.repository


@dataclass(frozen=True)
class Component:
    """A part of a diffusers checkpoint.

    Attributes:
        folder: its folder in the checkpoint.
        override: the config key that can replace it, if any.
        kinds: accepted classes: `_class_name` in its config, or `model_type` of a text encoder;
            empty if the family checks it.
    """

    folder: str
    override: str | None = None
    kinds: Sequence[str] = ()


@dataclass(frozen=True)
class AutoShift:
    """The shift of `flow_schedule_auto_shift` for a number of tokens.

    It is e^mu, where mu rises linearly between two numbers of tokens and is constant outside.
    """

    # As FLUX.1 is sampled: the defaults of diffusers' FlowMatchEulerDiscreteScheduler.
    fewest_tokens: int = 256
    lowest_mu: float = 0.5
    most_tokens: int = 4096
    highest_mu: float = 1.15

    def __call__(self, tokens: int) -> float:
        share = (tokens - self.fewest_tokens) / (self.most_tokens - self.fewest_tokens)
        share = min(max(share, 0.0), 1.0)
        return math.exp(self.lowest_mu + (self.highest_mu - self.lowest_mu) * share)


@dataclass(frozen=True)
class CaptionFormat:
    """A family's handling of captions.

    Attributes:
        longest: longest caption in tokens.
        reserved: number of these tokens that the prompt's format takes.
        clean: cleans a caption before encoding.
        fingerprint: identifies the wording of the prompt template in the text cache.
        bare_fingerprint: fingerprint of negative prompts and the empty caption, which have no
            template; None if it is the same.
        dataset_keys: dataset keys that only this family reads.
        apply_dataset_keys: applies these keys to a caption.
        picture_tasks: tasks whose prompt includes the source picture.
        captioner: `module:Class` that captions pictures with the checkpoint's text encoder, or
            None.
    """

    longest: int
    clean: Callable[[str], str]
    fingerprint: Callable[[FamilyOptions, Flavour], str]
    reserved: int = 0
    bare_fingerprint: str | None = None
    dataset_keys: frozenset[str] = frozenset()
    apply_dataset_keys: Callable[[DatasetConfig, str], str] = field(
        default=lambda dataset, caption: caption
    )
    picture_tasks: frozenset[Task] = frozenset()
    captioner: str | None = None

    def length(self, text: TextConfig) -> int:
        """Maximum caption length of a run in tokens; longer captions are truncated."""
        return min(text.tokenizer_max_length or self.longest, self.longest)

    def room(self, text: TextConfig) -> int:
        """Maximum caption length in tokens, without the prompt's format."""
        return self.length(text) - self.reserved


SizeCheck = Callable[
    [RunConfig, Flavour, Sequence[Size], Mapping[str, Sequence[Size]], Problems], None
]


@dataclass(frozen=True)
class FamilyChecks:
    """The checks that are specific to a family.

    Attributes:
        settings: problems of a config.
        checkpoint: problems of the parts of a checkpoint that are on this machine.
        sizes: warnings about preview sizes and trained sizes by dataset id.
    """

    settings: Callable[[RunConfig, Flavour, Problems], None]
    checkpoint: Callable[[Flavour, ModelSource, Problems], None]
    sizes: SizeCheck = field(default=lambda config, flavour, used, trained, report: None)


@dataclass(frozen=True)
class FamilySpec:
    """A family as plain data: facts, checks, and the handling of captions.

    Attributes:
        name: value of `model_family`.
        flavours: the published checkpoints; the first is the default.
        adapter: `module:Class` of the adapter.
        options: the config keys of this family; related families share them.
        defaults: family defaults by config key, which replace the global ones.
        fixed: values that the family fixes, by config key; the user's values are ignored with a
            warning.
        components: the parts of a checkpoint, by role.
        size_multiple: width and height of pictures must be multiples of this many pixels.
        vae_stride: pixels per latent position on each side.
        patch_size: latent positions per token on each side.
        largest_side: pixels per side covered by the model's position tables.
        auto_shift: tokens of a sample -> shift, for `flow_schedule_auto_shift`.
        native_sizes: (width, height) of the sizes the model was trained at, by resolution.
        lora_targets: modules that get a LoRA by default.
        lora_presets: named selections for `peft_lora_target_modules`, as regular expressions.
        adapter_classes: class names that a LyCORIS file may use, the generic ones first, as regular
            expressions of the paths of these modules.
        quantised_layers: regular expression for the linear layers that a quantised base model
            quantises.
        license: license of the published weights.
        in_comfyui: whether ComfyUI supports the model, with diffusers' layer names.
        lora_settings_file: name of the settings file that the family's official program expects
            beside a LoRA.
        token_blocks: key in the transformer's config.json with the number of blocks that token
            routing can skip; None without support for routing.
        block_counts: keys in the transformer's config.json with the number of blocks, by group name
            in weight files; the last group has the visual blocks.
        grid: (flavour, checkpoint) -> required multiple of width and height, if it can exceed
            `size_multiple`.
        attention: (flavour, checkpoint, sizes of previews) -> the attention that is trained, for
            the plan; None where a checkpoint has only one.
        transformer_overrides: settings of a run by key -> what they replace in the transformer's
            config.json.
        frame_rate: frames per second that clips are trained and sampled at; None for pictures.
        frame_stride: frames per latent frame: F frames give (F - 1) / frame_stride + 1.
        slices_convolutions: whether the VAE's convolutions can run in temporal slices
            (`vae_enable_patch_conv`).
        decodes_in_strips: whether decoding in strips saves memory (`validation_decoding`).
        fast_blocks: whether the adapter has faster blocks than diffusers.
        heads: config.json of the transformer -> number of self-attention heads, for sequence
            parallelism; None without support for it.
        cost: shapes, FLOPs and bytes, for the plan.
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
    native_sizes: Mapping[int, Sequence[Size]]
    lora_targets: Sequence[str]
    lora_presets: Mapping[str, str]
    adapter_classes: Mapping[str, str]
    quantised_layers: str
    license: str
    checks: FamilyChecks
    captions: CaptionFormat
    cost: FamilyCost
    fixed: Mapping[str, Any] = field(default_factory=dict)
    block_counts: Mapping[str, str] = field(default_factory=dict)
    token_blocks: str | None = None
    grid: Callable[[Flavour, ModelSource], int] | None = None
    attention: Callable[[Flavour, ModelSource, Sequence[Size]], str | None] | None = None
    transformer_overrides: Callable[[Mapping[str, Any]], Mapping[str, object]] = field(
        default=lambda settings: {}
    )
    frame_rate: float | None = None
    frame_stride: int = 1
    slices_convolutions: bool = False
    decodes_in_strips: bool = True
    fast_blocks: bool = False
    heads: Callable[[Mapping[str, object]], int] | None = None
    auto_shift: AutoShift = field(default_factory=AutoShift)
    in_comfyui: bool = False
    lora_settings_file: str = ""

    @property
    def flavour_names(self) -> list[str]:
        return [flavour.name for flavour in self.flavours]

    @property
    def media_noun(self) -> str:
        """`clips` or `pictures`, for messages."""
        return "clips" if self.media == "video" else "pictures"

    @property
    def text_encoders(self) -> int:
        """The number of text encoders."""
        return len([role for role in self.components if role.startswith("text_encoder")])

    def flavour(self, name: str | None) -> Flavour:
        """The flavour of that name; None is the default flavour.

        Raises:
            KeyError: the family has no flavour of this name.
        """
        if name is None:
            return self.flavours[0]
        by_name = {flavour.name: flavour for flavour in self.flavours}
        return by_name[name]

    def for_flavour(self, name: str | None) -> FamilySpec:
        """This family with the changes of a flavour; an unknown name changes nothing."""
        if name is not None and name not in self.flavour_names:
            return self
        flavour = self.flavour(name)
        defaults = {**self.defaults, **flavour.defaults}
        return replace(self, **flavour.changes, defaults=defaults)

    def for_checkpoint(self, flavour: Flavour, source: ModelSource) -> FamilySpec:
        """This family with the pixel grid that a checkpoint needs."""
        if self.grid is None:
            return self
        multiple = self.grid(flavour, source)
        if multiple == self.size_multiple:
            return self
        defaults = {**self.defaults, "aspect_bucket_alignment": str(multiple)}
        return replace(self, size_multiple=multiple, defaults=defaults)

    def latent_size(self, width: int, height: int, frames: int) -> tuple[int, int, int]:
        """(frames, height, width) of the latents of a picture or clip of this size in pixels."""
        # Causal video VAEs encode the first frame alone, the others in groups of `frame_stride`.
        latent_frames = (frames - 1) // self.frame_stride + 1
        return latent_frames, height // self.vae_stride, width // self.vae_stride

    def tokens(self, frames: int, height: int, width: int) -> int:
        """Transformer tokens of latents of this size."""
        return frames * (height // self.patch_size) * (width // self.patch_size)
