"""Representation alignment (CREPA): keys, and the rules between them and other keys. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from simpletuner.config.option import TechniqueGroup, beyond_last, common, option, when
from simpletuner.config.types import Flag, Integer, Number, Text
from simpletuner.errors import Problems

if TYPE_CHECKING:
    from simpletuner.config.schema import RunConfig
    from simpletuner.config.techniques import Route
    from simpletuner.data.dataset import Dataset
    from simpletuner.models.spec import FamilySpec

PATCH = 14  # pixels per side of a patch of DINOv2


class CrepaConfig(TechniqueGroup):
    """CREPA"""

    requires = when("crepa_enabled")

    crepa_enabled: Flag = common(False, label="CREPA")
    """Align a block's hidden states, frame by frame, with features of a frozen vision encoder or of a later block."""
    crepa_block_index: Integer | None = common(None, ge=0, default_note="8; Sana Video 10")
    """The aligned block, counted from 0."""
    crepa_lambda: Number = common(0.5, ge=0, le=1000, label="Weight")
    """Weight of the alignment in the loss; 0: plain training."""
    crepa_adjacent_distance: Integer = common(1, ge=0)
    """Also align a frame with frames at this distance before and after, in latent frames; 0: only with itself."""
    crepa_adjacent_tau: Number = common(1.0, gt=0, le=1000, label="Temporal Decay")
    """A frame at distance d has the weight exp(-d / tau)."""
    crepa_cumulative_neighbors: Flag = option(False)
    """Use all distances up to crepa_adjacent_distance, not only that one."""
    crepa_normalize_by_frames: Flag = option(True)
    """Average over the frames instead of summing."""
    crepa_normalize_neighbour_sum: Flag = option(False)
    """Divide each frame's sum by the sum of its weights."""
    crepa_spatial_align: Flag = option(True)
    """Compare position by position; false: compare frame means."""
    crepa_feature_source: Literal["encoder", "backbone"] = option(
        "encoder",
        refused={"self_flow": "is not available: it needs a moving-average teacher and a timestep for every token"},
    )
    """Source of the teacher's features: a vision encoder, or a later block of the model."""
    crepa_use_backbone_features: Flag = option(False)
    """Same as crepa_feature_source backbone."""
    crepa_teacher_block_index: Integer | None = option(
        None,
        ge=0,
        requires=when("crepa_use_backbone_features", crepa_feature_source="backbone", because="no block teaches"),
    )
    """The teacher's block, counted from 0, for crepa_feature_source backbone."""
    crepa_encoder: Text = common("dinov2_vitg14", aliases=("crepa_model",), label="Vision Encoder")
    """dinov2_vits14, _vitb14, _vitl14 or _vitg14, each also with _reg, or a folder or hub id in transformers format."""
    # 37 patches per side, the final training resolution of DINOv2.
    crepa_encoder_image_size: Integer = common(518, ge=64, label="Vision Encoder Size")
    """Input size of the vision encoder in pixels per side, a multiple of 14. Smaller is faster and coarser."""
    crepa_encoder_resize: Literal["aspect", "square"] = option("aspect")
    """square: stretch frames to a square; aspect: keep their proportions, with no more patches than a square."""
    crepa_encoder_frames_batch_size: Integer = option(-1, ge=-1)
    """Frames per encoder batch; -1: a whole clip."""
    crepa_cache: Literal["auto", "disk", "off"] = option("auto")
    """disk: store features beside the latents, so that training loads neither encoder nor VAE; off: compute them in
    every step; auto: disk if they fit into a fifth of the free space."""
    crepa_drop_vae_encoder: Flag = common(False)
    """Drop the encoder half of the teacher's VAE, which saves memory."""
    crepa_scheduler: Literal["constant", "linear", "cosine", "polynomial"] = option("constant")
    """Decay of the weight from crepa_lambda to crepa_lambda_end."""
    crepa_warmup_steps: Integer = option(0, ge=0)
    """Steps of a linear warm-up from 0."""
    crepa_decay_steps: Integer = option(0, ge=0)
    """Last step of the decay; 0: the last step of the run."""
    crepa_lambda_end: Number = option(0.0, ge=0, le=1000, label="End Weight")
    """Weight after the decay."""
    crepa_power: Number = option(1.0, gt=0, le=1000)
    """Power of the polynomial schedule."""
    crepa_cutoff_step: Integer = option(0, ge=0)
    """Step from which the weight is 0; 0: never."""
    crepa_similarity_threshold: Number | None = option(None, gt=0, le=1)
    """Turn CREPA off when the moving average of crepa_alignment_score reaches this value."""
    crepa_similarity_ema_decay: Number = option(0.99, ge=0, lt=1)
    """Decay of the moving average."""
    crepa_threshold_mode: Literal["permanent", "recoverable"] = option("permanent")
    """After the threshold is reached: off permanently, or until the average falls below it."""

    @property
    def from_backbone(self) -> bool:
        """Whether a later block is the teacher."""
        return self.crepa_use_backbone_features or self.crepa_feature_source == "backbone"

    @property
    def needs_encoder(self) -> bool:
        """Whether vision encoder features are used; not if the weight is always 0."""
        # A schedule that starts at 0 may end above it.
        decays = self.crepa_scheduler != "constant" and self.crepa_lambda_end > 0
        return self.crepa_enabled and not self.from_backbone and (self.crepa_lambda > 0 or decays)

    def patches(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of encoder patches for a frame of these proportions."""
        side = self.crepa_encoder_image_size // PATCH
        if self.crepa_encoder_resize == "square":
            return side, side
        # rows · columns <= side² and rows : columns ≈ height : width; 1e-9 in case sqrt ends just below an integer.
        rows, columns = (int(side * math.sqrt(ratio) + 1e-9) for ratio in (height / width, width / height))
        return max(rows, 1), max(columns, 1)

    def check(self, config: RunConfig, report: Problems) -> None:
        """Report contradictions between keys."""
        _check_source(self, config.is_explicit, report)
        if self.crepa_scheduler != "constant" and 0 < self.crepa_decay_steps <= self.crepa_warmup_steps:
            message = f"{self.crepa_decay_steps} is not after crepa_warmup_steps {self.crepa_warmup_steps}, where the"
            report.warn("crepa_decay_steps", f"{message} decay begins: the weight drops in one step.")
        side = self.crepa_encoder_image_size
        if side % PATCH:
            below = side // PATCH * PATCH
            message = f"{side} is not a multiple of {PATCH}; the nearest are {below} and {below + PATCH}."
            report.error("crepa_encoder_image_size", message)

    def check_model(self, spec: FamilySpec, routes: Sequence[Route], blocks: int | None, report: Problems) -> None:
        """Report a model without frames to align, and blocks that it lacks."""
        if spec.media != "video":
            report.error("crepa_enabled", f"aligns the frames of clips, but {spec.title} makes pictures.")
        chosen = {"crepa_block_index": self.crepa_block_index}
        if self.from_backbone:
            chosen["crepa_teacher_block_index"] = self.crepa_teacher_block_index
        beyond_last(chosen, blocks, report)

    def check_datasets(self, config: RunConfig, datasets: Sequence[Dataset], report: Problems) -> None:
        """Report datasets that are encoded during training, when the teacher is loaded."""
        for dataset in (each.config for each in datasets if self.needs_encoder and each.config.is_trained):
            reasons = {
                "vae_cache_disable": dataset.vae_cache_disable,
                "vae_cache_ondemand": config.caching.vae_cache_ondemand,
                "vae_cache_clear_each_epoch": dataset.vae_cache_clear_each_epoch,
            }
            later = [key for key, is_on in reasons.items() if is_on]
            # Caches are cleared between epochs, and features are then cached again along with the latents.
            if later and later[0] != "vae_cache_clear_each_epoch" and self.crepa_cache != "off":
                message = f"{self.crepa_cache!r} needs latents that are cached before training;"
                report.error("crepa_cache", f"{message} with {later[0]} use off.")
            if later and self.crepa_drop_vae_encoder:
                message = f"with {later[0]} {dataset.id} is encoded during training, which needs that half;"
                report.error("crepa_drop_vae_encoder", f"{message} remove one of them.")

    @property
    def late(self) -> Mapping[str, str]:
        return {"crepa_warmup_steps": "crepa_lambda is never reached"}


def _check_source(crepa: CrepaConfig, is_explicit: Callable[[str], bool], report: Problems) -> None:
    """Check for a single feature source, and for a teacher block after the student."""
    source, flag = crepa.crepa_feature_source, crepa.crepa_use_backbone_features
    # Only explicit keys can contradict each other.
    both = is_explicit("crepa_feature_source") and is_explicit("crepa_use_backbone_features")
    if both and flag != (source == "backbone"):
        message = f"{source!r} contradicts crepa_use_backbone_features {str(flag).lower()}; remove one of them."
        report.error("crepa_feature_source", message)
    teacher, student = crepa.crepa_teacher_block_index, crepa.crepa_block_index
    if not crepa.from_backbone:
        return
    if teacher is None or teacher == student:
        unset = "is not set" if teacher is None else f"{teacher} is crepa_block_index, too"
        report.error("crepa_teacher_block_index", f"{unset}: a block cannot be its own teacher; name a later one.")
    elif student is not None and teacher < student:
        message = f"{teacher} comes before crepa_block_index {student}; a teacher is a later block."
        report.warn("crepa_teacher_block_index", message)
