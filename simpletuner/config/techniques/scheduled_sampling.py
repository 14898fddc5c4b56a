"""Keys of scheduled sampling with ReflexFlow, and its chances and numbers of rolled-out steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Literal

from simpletuner.config.loss import HEAVIEST
from simpletuner.config.option import TechniqueGroup, common, option, unless, when
from simpletuner.config.types import Flag, Integer, Number

PREFIX = "scheduled_sampling_"
OFFSET = f"{PREFIX}max_step_offset"
PROBABILITY = f"{PREFIX}probability"
RAMP = f"{PREFIX}ramp_steps"
ramped = partial(option, requires=when(RAMP))
reflexflow = partial(option, requires=when(f"{PREFIX}reflexflow"))

FINENESS = 1000  # sample points for means
# (uniform number in [0, 1), largest offset) -> offset
STRATEGIES: Mapping[str, Callable[[float, int], int]] = {
    # The share is below 1, so 0 to `most` are equally likely; squaring favours small offsets.
    "uniform": lambda share, most: int(share * (most + 1)),
    "biased_early": lambda share, most: round(share * share * most),
    "biased_late": lambda share, most: round((1 - share * share) * most),
}


class ScheduledSamplingConfig(TechniqueGroup):
    """Scheduled sampling"""

    requires = when(OFFSET)

    scheduled_sampling_max_step_offset: Integer = common(0, ge=0)
    """Maximum number of sampler steps rolled out to make an input; see
    docs/experimental/SCHEDULED_SAMPLING.md."""
    scheduled_sampling_probability: Number = common(
        0.0,
        ge=0,
        le=1,
        requires=unless(
            RAMP, because=f"{RAMP} is set, so the probability follows prob_start and prob_end"
        ),
    )
    """Probability per sample, without a ramp."""
    scheduled_sampling_prob_start: Number = ramped(0.0, ge=0, le=1)
    """Probability before and at the start of a ramp."""
    scheduled_sampling_prob_end: Number = ramped(0.5, ge=0, le=1)
    """Probability from the end of a ramp on."""
    scheduled_sampling_ramp_steps: Integer = option(0, ge=0)
    """Length of the ramp in steps; 0 disables it."""
    scheduled_sampling_start_step: Integer = option(0, ge=0)
    """First step of the ramp, or of a fixed probability."""
    scheduled_sampling_ramp_shape: Literal["linear", "cosine"] = ramped("linear")
    """How the probability grows along the ramp."""
    scheduled_sampling_strategy: Literal["uniform", "biased_early", "biased_late"] = option(
        "uniform"
    )
    """Distribution of the number of rolled-out steps: uniform, mostly few, or mostly many."""
    scheduled_sampling_sampler: Literal["unipc", "euler", "dpm"] = option("unipc")
    """Solver of the rollout."""
    scheduled_sampling_order: Integer = option(
        2, ge=1, le=3, requires=when(scheduled_sampling_sampler=("unipc", "dpm"))
    )
    """Order of unipc and dpm."""
    scheduled_sampling_reflexflow: Flag = common(True)
    """Correct the drift of rolled-out samples in the loss (ReflexFlow)."""
    scheduled_sampling_reflexflow_alpha: Number = reflexflow(1.0, ge=0, le=HEAVIEST)
    """Extra weight of positions where sampling lost content."""
    scheduled_sampling_reflexflow_beta1: Number = reflexflow(10.0, ge=0, le=HEAVIEST)
    """Weight of the direction term (reflexflow_adr)."""
    scheduled_sampling_reflexflow_beta2: Number = reflexflow(1.0, ge=0, le=HEAVIEST)
    """Factor on the loss of rolled-out samples."""

    @property
    def is_on(self) -> bool:
        """Whether any sample can have an offset."""
        if self.scheduled_sampling_max_step_offset == 0:
            return False
        if not self.scheduled_sampling_ramp_steps:
            return self.scheduled_sampling_probability > 0
        # A ramp may also descend.
        return self.scheduled_sampling_prob_start > 0 or self.scheduled_sampling_prob_end > 0

    @property
    def compares_clean(self) -> bool:
        """Whether the loss also needs the prediction for the plain input."""
        return self.scheduled_sampling_reflexflow and self.scheduled_sampling_reflexflow_alpha > 0

    def probability_at(self, step: int) -> float:
        """Probability per sample after `step` optimizer steps."""
        since = step - self.scheduled_sampling_start_step
        if not self.scheduled_sampling_ramp_steps:
            return self.scheduled_sampling_probability if since >= 0 else 0.0
        share = min(max(since / self.scheduled_sampling_ramp_steps, 0.0), 1.0)
        if self.scheduled_sampling_ramp_shape == "cosine":
            share = 0.5 - 0.5 * math.cos(math.pi * share)
        start = self.scheduled_sampling_prob_start
        end = self.scheduled_sampling_prob_end
        return start + (end - start) * share

    def offset_at(self, share: float) -> int:
        """The offset for a uniform number in [0, 1)."""
        return STRATEGIES[self.scheduled_sampling_strategy](
            share, self.scheduled_sampling_max_step_offset
        )

    def mean_passes(self, total_steps: int) -> float:
        """Mean number of extra forward passes per sample, over a run of that length."""
        # At most FINENESS steps of the run, and the midpoints of FINENESS equal slices of [0, 1).
        steps = range(0, max(total_steps, 1), total_steps // FINENESS + 1)
        passes = []
        for index in range(FINENESS):
            offset = self.offset_at((index + 0.5) / FINENESS)
            # A rolled-out sample may need one more pass, with its plain input.
            compares = self.compares_clean and offset > 0
            passes.append(offset + 1 if compares else offset)
        return fmean(map(self.probability_at, steps)) * fmean(passes)

    @property
    def late(self) -> Mapping[str, str]:
        return {f"{PREFIX}start_step": "no input is rolled out"} if self.is_on else {}

    @property
    def related(self) -> Sequence[str]:
        """The rollout uses the schedule of the preview sampler."""
        return ("validation_num_inference_steps",) if self.is_on else ()
