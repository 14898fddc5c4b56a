"""Keys of the loss: its kind, and what is added to the noise."""

from __future__ import annotations

from functools import partial
from typing import Literal

from simpletuner.config.option import Group, common, option, when
from simpletuner.config.types import Integer, Number

MOST_NOISE = 10  # standard deviations; 0.1 is usual
HEAVIEST = 1000  # weight of a loss term; the loss itself has weight 1
huber = partial(option, requires=when(loss_type=("huber", "smooth_l1")))


class LossConfig(Group):
    """Loss"""

    loss_type: Literal["l2", "huber", "smooth_l1"] = common("l2")
    """How an error counts: l2 by its square; huber and smooth_l1 count large errors less."""
    huber_schedule: Literal["snr", "exponential", "constant"] = huber("snr")
    """How huber_c depends on the timestep."""
    huber_c: Number = huber(0.1, gt=0, le=1000, common=True)
    """Threshold between the quadratic and the linear part of huber and smooth_l1."""
    input_perturbation: Number = option(0.0, ge=0, le=MOST_NOISE)
    """Extra noise on the input only."""
    input_perturbation_steps: Integer = option(0, ge=0, requires=when("input_perturbation"))
    """Step at which input_perturbation has decayed linearly to 0; 0 keeps it constant."""
    noise_offset: Number = option(0.0, ge=0, le=MOST_NOISE)
    """Offset of the noise mean per sample and channel."""
    noise_offset_probability: Number = option(1.0, ge=0, le=1, requires=when("noise_offset"))
    """Share of samples with noise_offset."""

    def input_perturbation_at(self, step: int) -> float:
        """The strength of `input_perturbation` after `step` optimizer steps."""
        if not self.input_perturbation_steps:
            return self.input_perturbation
        return self.input_perturbation * max(0.0, 1 - step / self.input_perturbation_steps)
