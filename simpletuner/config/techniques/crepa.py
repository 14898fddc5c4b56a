"""Keys of representation alignment (CREPA), and values derived from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from simpletuner.config.option import TechniqueGroup, common, option, when
from simpletuner.config.types import Flag, Integer, Number, Text

PATCH = 14  # pixels per side of a patch of DINOv2


class CrepaConfig(TechniqueGroup):
    """CREPA"""

    requires = when("crepa_enabled")

    crepa_enabled: Flag = common(False, label="CREPA")
    """Align a block's hidden states, frame by frame, with features of a frozen vision encoder or of
    a later block."""
    crepa_block_index: Integer | None = common(None, ge=0, default_note="8; Sana Video 10")
    """The aligned block, counted from 0."""
    crepa_lambda: Number = common(0.5, ge=0, le=1000, label="Weight")
    """Weight of the alignment in the loss; 0: plain training."""
    crepa_adjacent_distance: Integer = common(1, ge=0)
    """Also align a frame with those this many latent frames before and after; 0: only with
    itself."""
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
        refused={
            "self_flow": (
                "is not available: it needs a moving-average teacher and a timestep for every token"
            )
        },
    )
    """Source of the teacher's features: a vision encoder, or a later block of the model."""
    crepa_use_backbone_features: Flag = option(False)
    """Same as crepa_feature_source backbone."""
    crepa_teacher_block_index: Integer | None = option(
        None,
        ge=0,
        requires=when(
            "crepa_use_backbone_features",
            crepa_feature_source="backbone",
            because="no block teaches",
        ),
    )
    """The teacher's block, counted from 0, for crepa_feature_source backbone."""
    crepa_encoder: Text = common("dinov2_vitg14", aliases=("crepa_model",), label="Vision Encoder")
    """dinov2_vits14, _vitb14, _vitl14 or _vitg14, each also with _reg, or a folder or hub id in
    transformers format."""
    # 37 patches per side, the final training resolution of DINOv2.
    crepa_encoder_image_size: Integer = common(518, ge=64, label="Vision Encoder Size")
    """Input size of the vision encoder in pixels per side, a multiple of 14. Smaller is faster and
    coarser."""
    crepa_encoder_frames_batch_size: Integer = option(-1, ge=-1)
    """Frames per encoder batch; -1: a whole clip."""
    crepa_cache: Literal["auto", "disk", "off"] = option("auto")
    """Where the teacher's features are kept. disk: beside the latents, so that training loads
    neither encoder nor VAE; off: computed in every step; auto: disk if they fit into a fifth of the
    free space."""
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
        """Rows and columns of encoder patches for a frame of these proportions.

        A square of crepa_encoder_image_size has side² patches; other frames get at most as many.
        """
        side = self.crepa_encoder_image_size // PATCH
        # rows · columns <= side² and rows : columns ≈ height : width; 1e-9 in case sqrt ends just
        # below an integer.
        rows = int(side * math.sqrt(height / width) + 1e-9)
        columns = int(side * math.sqrt(width / height) + 1e-9)
        return max(rows, 1), max(columns, 1)

    @property
    def late(self) -> Mapping[str, str]:
        return {"crepa_warmup_steps": "crepa_lambda is never reached"}
