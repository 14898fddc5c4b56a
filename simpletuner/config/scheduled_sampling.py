"""Scheduled sampling with ReflexFlow: its keys, what follows from them, and the rules between them. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from simpletuner.config.option import TechniqueGroup, common, option, unless, when
from simpletuner.config.values import Flag, Integer, Number
from simpletuner.errors import NoEffect, Problem

if TYPE_CHECKING:
    from simpletuner.config.schema import RunConfig

PREFIX = "scheduled_sampling_"
OFFSET, PROBABILITY, RAMP = (f"{PREFIX}{name}" for name in ("max_step_offset", "probability", "ramp_steps"))
ramped = partial(option, requires=when(RAMP))
reflexflow = partial(option, requires=when(f"{PREFIX}reflexflow"))

FINENESS = 1000  # points at which means are computed
# (a uniform number in [0, 1), the largest offset) -> an offset.
STRATEGIES: Mapping[str, Callable[[float, int], int]] = {
    # The share is below 1, so all of 0 to most are as likely; squares crowd near 0.
    "uniform": lambda share, most: int(share * (most + 1)),
    "biased_early": lambda share, most: round(share * share * most),
    "biased_late": lambda share, most: round((1 - share * share) * most),
}


class ScheduledSamplingConfig(TechniqueGroup):
    """Scheduled sampling"""

    requires = when(OFFSET)

    scheduled_sampling_max_step_offset: Integer = common(
        0, "Maximum number of sampler steps rolled out to make an input; see docs/experimental/SCHEDULED_SAMPLING.md.",
        ge=0,)  # fmt: skip
    scheduled_sampling_probability: Number = common(
        0.0,
        "Probability per sample, without a ramp.",
        ge=0,
        le=1,
        requires=unless(RAMP, because=f"{RAMP} is set, so the probability follows prob_start and prob_end"),
    )
    scheduled_sampling_prob_start: Number = ramped(0.0, "Probability before and at the start of a ramp.", ge=0, le=1)
    scheduled_sampling_prob_end: Number = ramped(0.5, "Probability at the end of a ramp and after it.", ge=0, le=1)
    scheduled_sampling_ramp_steps: Integer = option(0, "Length of the ramp; 0 is none.", ge=0)
    scheduled_sampling_start_step: Integer = option(0, "Start of the ramp, or of a fixed probability.", ge=0)
    scheduled_sampling_ramp_shape: Literal["linear", "cosine"] = ramped("linear", "Shape of the ramp.")
    scheduled_sampling_strategy: Literal["uniform", "biased_early", "biased_late"] = option(
        "uniform", "Distribution of the number of steps: uniform, mostly few, or mostly many."
    )
    scheduled_sampling_sampler: Literal["unipc", "euler", "dpm"] = option("unipc", "The solver of these steps.")
    scheduled_sampling_order: Integer = option(
        2, "Order of unipc and dpm.", ge=1, le=3, requires=when(scheduled_sampling_sampler=("unipc", "dpm"))
    )
    scheduled_sampling_reflexflow: Flag = common(True, "Correct the drift of these samples in the loss (ReflexFlow).")
    scheduled_sampling_reflexflow_alpha: Number = reflexflow(
        1.0, "Extra weight of positions where sampling lost content.", ge=0
    )
    scheduled_sampling_reflexflow_beta1: Number = reflexflow(10.0, "Weight of the direction (reflexflow_adr).", ge=0)
    scheduled_sampling_reflexflow_beta2: Number = reflexflow(1.0, "Factor of the loss of these samples.", ge=0)

    @property
    def is_on(self) -> bool:
        """Whether any sample can have an offset."""
        fixed, ramp = self.scheduled_sampling_probability, self.scheduled_sampling_ramp_steps
        # A ramp may also lead down.
        highest = max(self.scheduled_sampling_prob_start, self.scheduled_sampling_prob_end) if ramp else fixed
        return self.scheduled_sampling_max_step_offset > 0 and highest > 0

    @property
    def compares_clean(self) -> bool:
        """Whether the loss needs the prediction from the plain input, too."""
        return self.scheduled_sampling_reflexflow and self.scheduled_sampling_reflexflow_alpha > 0

    def probability_at(self, step: int) -> float:
        """Probability per sample after `step` optimizer steps."""
        since = step - self.scheduled_sampling_start_step
        if not self.scheduled_sampling_ramp_steps:
            return self.scheduled_sampling_probability if since >= 0 else 0.0
        share = min(max(since / self.scheduled_sampling_ramp_steps, 0.0), 1.0)
        if self.scheduled_sampling_ramp_shape == "cosine":
            share = 0.5 - 0.5 * math.cos(math.pi * share)
        start, end = self.scheduled_sampling_prob_start, self.scheduled_sampling_prob_end
        return start + (end - start) * share

    def offset_at(self, share: float) -> int:
        """The offset for a uniform number in [0, 1)."""
        return STRATEGIES[self.scheduled_sampling_strategy](share, self.scheduled_sampling_max_step_offset)

    def mean_passes(self, total_steps: int) -> float:
        """Mean number of extra forward passes of a sample, over a run of that length."""
        # At most FINENESS steps of the run, and the middles of FINENESS equal slices of [0, 1).
        steps = range(0, max(total_steps, 1), total_steps // FINENESS + 1)
        offsets = [self.offset_at((index + 0.5) / FINENESS) for index in range(FINENESS)]
        passes = fmean(offset + (self.compares_clean and offset > 0) for offset in offsets)
        return fmean(map(self.probability_at, steps)) * passes

    def check(self, config: RunConfig) -> Iterator[Problem]:
        """Offsets that the sampler of previews can have, with a probability; and no other way to make inputs."""
        offset, ramp = self.scheduled_sampling_max_step_offset, self.scheduled_sampling_ramp_steps
        if offset and not self.is_on:
            reason = "probabilities are 0" if ramp else f"{PROBABILITY} is 0"
            yield NoEffect(OFFSET, f"has no effect: {reason}.")
        steps = config.validation.validation_num_inference_steps
        if steps is not None and offset > steps:
            message = f"{offset} is more than the {steps} steps of the sampler (validation_num_inference_steps)."
            yield Problem(OFFSET, message)
        if config.flow.mixflow_enabled and self.is_on:
            yield Problem("mixflow_enabled", f"and {OFFSET} exclude each other: both make inputs for the same end.")

    @property
    def late(self) -> Mapping[str, str]:
        return {f"{PREFIX}start_step": "no input is rolled out"} if self.is_on else {}

    @property
    def related(self) -> Sequence[str]:
        """Its steps are those of the sampler of previews."""
        return ("validation_num_inference_steps",) if self.is_on else ()
