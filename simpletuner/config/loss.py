"""The loss and masks in it: keys and their rules. Free of torch."""

from __future__ import annotations

from functools import partial
from typing import Literal

from simpletuner.config.option import Flag, Group, Integer, Number, accepted, common, option, when

huber = partial(option, requires=when(loss_type=("huber", "smooth_l1")))


class LossConfig(Group):
    """Loss"""

    loss_type: Literal["l2", "huber", "smooth_l1"] = common("l2", "Distance between prediction and target.")
    huber_schedule: Literal["snr", "exponential", "constant"] = huber("snr", "How huber_c depends on the timestep.")
    huber_c: Number = huber(0.1, "Where huber and smooth_l1 change from quadratic to linear.", gt=0, common=True)
    snr_gamma: Number | None = accepted(None, "it does not apply to flow models", ge=0)
    input_perturbation: Number = option(0.0, "Extra noise on the input only.", ge=0)
    input_perturbation_steps: Integer = option(
        0, "Lower input_perturbation in a straight line to 0 at this step; 0 keeps it constant.", ge=0
    )
    noise_offset: Number = option(0.0, "Offset of the noise mean per sample and channel.", ge=0)
    noise_offset_probability: Number = option(1.0, "Share of samples with noise_offset.", ge=0, le=1)

    def input_perturbation_at(self, step: int) -> float:
        """The strength of `input_perturbation` after `step` optimizer steps."""
        if not self.input_perturbation_steps:
            return self.input_perturbation
        return self.input_perturbation * max(0.0, 1 - step / self.input_perturbation_steps)


class MaskedLossConfig(Group):
    """Masked loss"""

    masked_loss_probability: Number = common(
        1.0, "Share of the batches in which masks count; the others learn from the whole picture.", ge=0, le=1
    )
    masked_loss_normalise: Flag = option(
        False, "Divide a sample's loss by the mean of its mask (at least 0.05), so that small masks learn as fast."
    )
    masked_loss_floor: Number = option(0.0, "Weight of black areas; white areas weigh 1.", ge=0, le=1)
    masked_loss_prior: Number = option(
        0.0,
        "Weight of holding black areas at the base model's prediction (LoRA only, one more forward pass).",
        ge=0,
        requires=when(model_type="lora", because="the base model is the one without the LoRA", fatal=True),
    )
