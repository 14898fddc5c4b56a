"""Masked loss: its keys and their rules. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator

from simpletuner.config.option import Flag, Group, Number, option
from simpletuner.errors import Problem


class MaskedLossConfig(Group):
    """Masked loss"""

    masked_loss_probability: Number = option(
        1.0, "Share of the batches in which masks count; the others learn from the whole picture.", ge=0, le=1
    )
    masked_loss_normalise: Flag = option(
        False, "Divide a sample's loss by the mean of its mask (at least 0.05), so that small masks learn as fast."
    )
    masked_loss_floor: Number = option(0.0, "Weight of black areas; white areas weigh 1.", ge=0, le=1)
    masked_loss_prior: Number = option(
        0.0, "Weight of holding black areas at the base model's prediction (LoRA only, one more forward pass).", ge=0
    )


def check_masked_loss(config: MaskedLossConfig, model_type: str) -> Iterator[Problem]:
    """The prior compares with the base model."""
    if config.masked_loss_prior and model_type == "full":
        message = f"{config.masked_loss_prior:g} needs model_type lora: the base model is the one without the LoRA."
        yield Problem("masked_loss_prior", message)
