"""Keys of masked loss."""

from __future__ import annotations

from simpletuner.config.loss import HEAVIEST
from simpletuner.config.option import TechniqueGroup, common, option, when
from simpletuner.config.types import Flag, Number


class MaskedLossConfig(TechniqueGroup):
    """Masked loss"""

    masked_loss_probability: Number = common(1.0, ge=0, le=1)
    """Share of batches that use masks; all other batches learn from the whole picture."""
    masked_loss_normalise: Flag = option(False)
    """Divide a sample's loss by the mean of its mask (at least 0.05), so that small masks learn as
    fast as large ones."""
    masked_loss_floor: Number = option(0.0, ge=0, le=1)
    """Weight of black areas; white areas have weight 1."""
    masked_loss_prior: Number = option(
        0.0,
        ge=0,
        le=HEAVIEST,
        requires=when(
            model_type="lora", because="the base model is the model with the LoRA off", fatal=True
        ),
    )
    """Weight of a term that keeps the base model's prediction in black areas (LoRA only, one more
    forward pass)."""
