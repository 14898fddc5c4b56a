"""The neutral settings of every technique, at which it must be plain training."""

from __future__ import annotations

from simpletuner.config.alignment import CrepaConfig
from simpletuner.config.techniques import MaskedLossConfig, Route, ScheduledSamplingConfig
from simpletuner.planning.techniques.crepa import CrepaSpec
from simpletuner.planning.techniques.masked_loss import MaskedLossSpec
from simpletuner.planning.techniques.preservation import PreservationSpec, RegularisationSpec
from simpletuner.planning.techniques.scheduled_sampling import ScheduledSamplingSpec
from simpletuner.planning.techniques.slider import SliderSpec
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.planning.techniques.tread import TreadSpec

TRAINED = "trained"  # the dataset of the batches


def sampled(**settings: float) -> ScheduledSamplingSpec:
    """Scheduled sampling of every sample, unless a setting says otherwise."""
    chosen = {"max_step_offset": 5, "probability": 1.0, **settings}
    keys = {f"scheduled_sampling_{name}": value for name, value in chosen.items()}
    return ScheduledSamplingSpec(ScheduledSamplingConfig.model_validate(keys), steps=8, shift=None)


# By the name in `simpletuner.techniques.table.TECHNIQUES`.
NEUTRAL: dict[str, list[TechniqueSpec]] = {
    "crepa": [
        CrepaSpec(
            CrepaConfig(
                crepa_enabled=True,
                crepa_feature_source="backbone",
                crepa_block_index=1,
                crepa_teacher_block_index=3,
                crepa_lambda=0,
            )
        )
    ],
    "masked loss": [MaskedLossSpec(MaskedLossConfig(masked_loss_probability=0))],
    "preservation": [PreservationSpec(weight=0.0, probability=1.0), PreservationSpec(weight=1.0, probability=0.0)],
    "regularisation": [RegularisationSpec(frozenset({"another"}))],
    "scheduled sampling": [sampled(max_step_offset=0), sampled(probability=0.0), sampled(start_step=9)],
    "slider": [SliderSpec({TRAINED: 1.0})],
    "tread": [TreadSpec([Route(0.0, 0, -1)])],
}
