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
    """Features of the frames of a clip, by a vision encoder, at the resolution of the model's
    tokens.
    """

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
        frames_at_once = min(max(self.config.crepa_encoder_frames_batch_size, 0) or frames, frames)
        patches_at_once = patches * frames_at_once / frames
        return FeatureCost(
            stored=2.0 * frames * rows * columns * width,  # in bf16
            flops=2.0 * weights * patches,  # the encoder has no backward pass
            # bf16 weights, and at the widest layer about eight numbers per number of a token.
            memory=2 * (weights + 8 * width * patches_at_once),
        )


class CrepaSpec(TechniqueSpec):
    """CREPA, with its projector and the activations from the block's tokens to the loss, all in
    float32.

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
        """Width of the encoder's features, read from the encoder if it is on this machine by
        now.
        """
        return replace(self.encoder).width

    def cost(self, transformer: TransformerCost, batch: BatchShape) -> TechniqueCost:
        inner = transformer.hidden
        outer = inner if self.config.from_backbone else self.encoder.width
        tokens = batch.samples * batch.tokens
        matrix = inner * outer
        # Tokens on the grid and normalised; projected, unit length, and the teacher's.
        numbers = 2 * inner + 3 * outer
        return TechniqueCost(
            parameters=matrix + outer + 2 * inner,
            held=4.0 * tokens * numbers,  # float32 takes 4 bytes
            flops=6.0 * tokens * matrix,  # a weight costs 2 FLOPs per token forward and 4 backward
        )

    @classmethod
    def check(cls, config: RunConfig, report: Problems) -> None:
        """Report contradictions between keys."""
        crepa = config.techniques.of(CrepaConfig)
        _check_source(config, report)
        warmup = crepa.crepa_warmup_steps
        decay = crepa.crepa_decay_steps
        if crepa.crepa_scheduler != "constant" and 0 < decay <= warmup:
            message = (
                f"{decay} is not after crepa_warmup_steps {warmup}, where the decay begins: the "
                "weight drops"
            )
            report.warn("crepa_decay_steps", f"{message} in one step.")
        side = crepa.crepa_encoder_image_size
        if side % PATCH:
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
        chosen = {"crepa_block_index": crepa.crepa_block_index}
        if crepa.from_backbone:
            chosen["crepa_teacher_block_index"] = crepa.crepa_teacher_block_index
        for key, block in chosen.items():
            if block is not None and blocks is not None and block >= blocks:
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
            later = [key for key, is_on in reasons.items() if is_on]
            # Caches are cleared between epochs, and features are then cached again along with the
            # latents.
            if later and later[0] != "vae_cache_clear_each_epoch" and crepa.crepa_cache != "off":
                message = f"{crepa.crepa_cache!r} needs latents that are cached before training;"
                report.error("crepa_cache", f"{message} with {later[0]} use off.")
            if later and crepa.crepa_drop_vae_encoder:
                message = (
                    f"with {later[0]} {dataset.id} is encoded during training, which needs "
                    "that half;"
                )
                report.error("crepa_drop_vae_encoder", f"{message} remove one of them.")


def _check_source(config: RunConfig, report: Problems) -> None:
    """Check for a single feature source, and for a teacher block after the student."""
    crepa = config.techniques.of(CrepaConfig)
    source = crepa.crepa_feature_source
    flag = crepa.crepa_use_backbone_features
    # Only explicit keys can contradict each other.
    both = config.is_explicit("crepa_feature_source") and config.is_explicit(
        "crepa_use_backbone_features"
    )
    if both and flag != (source == "backbone"):
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
        unset = "is not set" if teacher is None else f"{teacher} is crepa_block_index, too"
        report.error(
            "crepa_teacher_block_index",
            f"{unset}: a block cannot be its own teacher; name a later one.",
        )
    elif student is not None and teacher < student:
        message = f"{teacher} comes before crepa_block_index {student}; a teacher is a later block."
        report.warn("crepa_teacher_block_index", message)
