"""Scheduled sampling: rollouts that fit the preview sampler, and their forward passes."""

from __future__ import annotations

from simpletuner.config.schema import RunConfig
from simpletuner.config.techniques.scheduled_sampling import (
    OFFSET,
    PROBABILITY,
    ScheduledSamplingConfig,
)
from simpletuner.errors import Problems
from simpletuner.models.cost import BatchShape, TransformerCost
from simpletuner.planning.techniques.spec import TechniqueCost, TechniqueSpec, TrainedData


class ScheduledSamplingSpec(TechniqueSpec):
    """Scheduled sampling, with the preview sampler that it follows.

    Attributes:
        steps: number of steps of the preview sampler, whose grid of noise levels the rollouts
            follow.
        shift: shift of that scheduler, if it replaces the checkpoint's.
        skipped: ids of datasets to skip, since their target is the base model.
        forwards: mean number of extra forward passes per micro-batch.
    """

    name = "scheduled sampling"
    trains = "simpletuner.techniques.scheduled_sampling:ScheduledSampling"
    keys = ScheduledSamplingConfig

    def __init__(
        self,
        config: ScheduledSamplingConfig,
        steps: int,
        shift: float | None,
        skipped: frozenset[str] = frozenset(),
        forwards: float = 0.0,
    ) -> None:
        self.config = config
        self.steps = steps
        self.shift = shift
        self.skipped = skipped
        self.forwards = forwards

    @classmethod
    def of(cls, config: RunConfig, data: TrainedData) -> ScheduledSamplingSpec | None:
        sampling = config.techniques.of(ScheduledSamplingConfig)
        steps = config.validation.validation_num_inference_steps
        if not sampling.is_on or steps is None:  # every family sets the steps
            return None
        forwards = data.plain * sampling.mean_passes(data.total_steps)
        return cls(sampling, steps, config.sampling_shift, data.ids, forwards)

    @classmethod
    def check(cls, config: RunConfig, report: Problems) -> None:
        """Report offsets beyond the preview sampler's steps or never used."""
        sampling = config.techniques.of(ScheduledSamplingConfig)
        offset = sampling.scheduled_sampling_max_step_offset
        if offset and not sampling.is_on:
            ramps = bool(sampling.scheduled_sampling_ramp_steps)
            reason = "probabilities are 0" if ramps else f"{PROBABILITY} is 0"
            report.no_effect(OFFSET, f"has no effect: {reason}.")
        steps = config.validation.validation_num_inference_steps
        if steps is not None and offset > steps:
            report.error(
                OFFSET, f"{offset} exceeds the {steps} steps of validation_num_inference_steps."
            )

    def cost(self, transformer: TransformerCost, batch: BatchShape) -> TechniqueCost:
        return TechniqueCost(forwards=self.forwards)
