"""CREPA: a teacher that exists, the features that it caches, and what its projector costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from simpletuner.caching.catalogue import FeatureCost, FeatureKind
from simpletuner.config.schema import RunConfig
from simpletuner.config.techniques.crepa import PATCH, CrepaConfig
from simpletuner.config.techniques.tread import Route
from simpletuner.data.dataset import Dataset
from simpletuner.errors import Problems
from simpletuner.models.cost import BatchShape, TransformerCost
from simpletuner.models.spec import FamilySpec
from simpletuner.models.vision import VisionEncoder
from simpletuner.planning.techniques.spec import TechniqueCost, TechniqueSpec, TrainedData

# How frames are resized for the encoder: their proportions are kept. Part of the keys of cached
# features.
RESIZE = "aspect"


class TeacherFeatures(FeatureKind):
    """A vision encoder's features of the frames of a clip, a vector per token of the model."""

    name = "crepa"
    encoder: VisionEncoder

    def __init__(
        self, config: CrepaConfig, encoder: VisionEncoder, unneeded: frozenset[str]
    ) -> None:
        self.config = config
        self.encoder = encoder
        self.unneeded = unneeded
        self.is_cached = config.crepa_cache != "off"

    @property
    def maker(self) -> Mapping[str, str | float]:
        return {"size": self.config.crepa_encoder_image_size, "resize": RESIZE}

    @property
    def spared_by(self) -> Mapping[str, object]:
        return {"crepa_cache": "off"} if self.config.crepa_cache == "auto" else {}

    def cost(self, frames: int, rows: int, columns: int) -> FeatureCost:
        weights = self.encoder.parameters
        width = self.encoder.width
        patches = frames * math.prod(self.config.patches(rows, columns))
        frames_at_once = frames
        if self.config.crepa_encoder_frames_batch_size > 0:
            frames_at_once = min(self.config.crepa_encoder_frames_batch_size, frames)
        patches_at_once = patches * frames_at_once / frames
        return FeatureCost(
            stored=2.0 * frames * rows * columns * width,  # in bf16
            flops=2.0 * weights * patches,  # the encoder has no backward pass
            # bf16 weights, and at the widest layer about eight numbers per number of a token.
            memory=2 * (weights + 8 * width * patches_at_once),
        )


class CrepaSpec(TechniqueSpec):
    """CREPA with its projector, which computes in float32 from a block's tokens to the loss.

    Attributes:
        regularised: datasets whose target is the base model; they are not aligned.
        total_steps: optimizer steps of the run, over which the weight decays.
    """

    name = "crepa"
    trains = "simpletuner.techniques.crepa:Crepa"
    keys = CrepaConfig

    def __init__(
        self, config: CrepaConfig, regularised: frozenset[str] = frozenset(), total_steps: int = 1
    ) -> None:
        self.config = config
        self.regularised = regularised
        self.total_steps = total_steps
        self.encoder = VisionEncoder(
            config.crepa_encoder, "crepa_encoder", "crepa_feature_source backbone needs no encoder."
        )
        if config.needs_encoder:
            self.features = (TeacherFeatures(config, self.encoder, regularised),)

    @classmethod
    def of(cls, config: RunConfig, data: TrainedData) -> CrepaSpec | None:
        crepa = config.techniques.of(CrepaConfig)
        return cls(crepa, data.ids, data.total_steps) if crepa.crepa_enabled else None

    @property
    def width(self) -> int:
        """Width of the encoder's features."""
        # A copy reads it anew: the encoder may have been downloaded since the plan.
        return replace(self.encoder).width

    def cost(self, transformer: TransformerCost, batch: BatchShape) -> TechniqueCost:
        hidden = transformer.hidden
        width = hidden if self.config.from_backbone else self.encoder.width
        tokens = batch.samples * batch.tokens
        projector = hidden * width
        bias = width
        norm = 2 * hidden  # scale and shift
        # Of a token: on the grid and normalised; then projected, of unit length, and the teacher's.
        held_numbers = 2 * hidden + 3 * width
        return TechniqueCost(
            parameters=projector + bias + norm,
            held=4.0 * tokens * held_numbers,  # float32
            # A weight costs 2 FLOPs per token in the forward pass and 4 in the backward pass.
            flops=6.0 * tokens * projector,
        )

    @classmethod
    def check(cls, config: RunConfig, report: Problems) -> None:
        """Report contradictions between keys."""
        crepa = config.techniques.of(CrepaConfig)
        _check_source(config, report)
        warmup = crepa.crepa_warmup_steps
        decay = crepa.crepa_decay_steps
        if crepa.crepa_scheduler != "constant" and 0 < decay <= warmup:
            report.warn(
                "crepa_decay_steps",
                f"{decay} is not after crepa_warmup_steps {warmup}, where the decay begins: the "
                "weight drops in one step.",
            )
        side = crepa.crepa_encoder_image_size
        if side % PATCH != 0:
            below = side // PATCH * PATCH
            message = (
                f"{side} is not a multiple of {PATCH}; the nearest are {below} and {below + PATCH}."
            )
            report.error("crepa_encoder_image_size", message)

    @classmethod
    def check_model(
        cls,
        config: RunConfig,
        spec: FamilySpec,
        routes: Sequence[Route],
        blocks: int | None,
        report: Problems,
    ) -> None:
        """Report a model without frames to align, and blocks that it lacks."""
        crepa = config.techniques.of(CrepaConfig)
        if spec.media != "video":
            report.error(
                "crepa_enabled", f"aligns the frames of clips, but {spec.title} makes pictures."
            )
        if blocks is None:
            return
        numbers = {"crepa_block_index": crepa.crepa_block_index}
        if crepa.from_backbone:
            numbers["crepa_teacher_block_index"] = crepa.crepa_teacher_block_index
        for key, block in numbers.items():
            if block is not None and block >= blocks:
                report.error(
                    key,
                    f"{block} is out of range: the model has {blocks} blocks, 0 to {blocks - 1}.",
                )

    @classmethod
    def check_datasets(
        cls, config: RunConfig, datasets: Sequence[Dataset], report: Problems
    ) -> None:
        """Report datasets that are encoded during training, when the teacher is loaded."""
        crepa = config.techniques.of(CrepaConfig)
        if not crepa.needs_encoder:
            return
        for dataset in datasets:
            if not dataset.config.is_trained:
                continue
            reasons = {
                "vae_cache_disable": dataset.config.vae_cache_disable,
                "vae_cache_ondemand": config.caching.vae_cache_ondemand,
                "vae_cache_clear_each_epoch": dataset.config.vae_cache_clear_each_epoch,
            }
            keys = [key for key, is_on in reasons.items() if is_on]
            if not keys:
                continue
            reason = keys[0]
            # A cache that is cleared between epochs is filled again with features and latents.
            if reason != "vae_cache_clear_each_epoch" and crepa.crepa_cache != "off":
                report.error(
                    "crepa_cache",
                    f"{crepa.crepa_cache!r} needs latents that are cached before training; with "
                    f"{reason} use off.",
                )
            if crepa.crepa_drop_vae_encoder:
                report.error(
                    "crepa_drop_vae_encoder",
                    f"with {reason} {dataset.id} is encoded during training, which needs that "
                    "half; remove one of them.",
                )


def _check_source(config: RunConfig, report: Problems) -> None:
    """Check for a single feature source, and for a teacher block after the student."""
    crepa = config.techniques.of(CrepaConfig)
    source = crepa.crepa_feature_source
    flag = crepa.crepa_use_backbone_features
    # Only explicit keys can contradict each other.
    keys = ("crepa_feature_source", "crepa_use_backbone_features")
    both_are_set = all(config.is_explicit(key) for key in keys)
    if both_are_set and flag != (source == "backbone"):
        message = (
            f"{source!r} contradicts crepa_use_backbone_features {str(flag).lower()}; remove one "
            "of them."
        )
        report.error("crepa_feature_source", message)
    if not crepa.from_backbone:
        return
    teacher = crepa.crepa_teacher_block_index
    student = crepa.crepa_block_index
    if teacher is None or teacher == student:
        fault = "is not set" if teacher is None else f"{teacher} is crepa_block_index, too"
        report.error(
            "crepa_teacher_block_index",
            f"{fault}: a block cannot be its own teacher; name a later one.",
        )
    elif student is not None and teacher < student:
        message = f"{teacher} comes before crepa_block_index {student}; a teacher is a later block."
        report.warn("crepa_teacher_block_index", message)
