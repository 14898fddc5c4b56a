"""How the tests exercise every technique: neutral settings, and runs in one or two processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simpletuner.config.techniques.crepa import CrepaConfig
from simpletuner.config.techniques.masked_loss import MaskedLossConfig
from simpletuner.config.techniques.scheduled_sampling import ScheduledSamplingConfig
from simpletuner.config.techniques.tread import Route
from simpletuner.planning.techniques.crepa import CrepaSpec
from simpletuner.planning.techniques.masked_loss import MaskedLossSpec
from simpletuner.planning.techniques.preservation import PreservationSpec, RegularisationSpec
from simpletuner.planning.techniques.scheduled_sampling import ScheduledSamplingSpec
from simpletuner.planning.techniques.slider import SliderSpec
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.planning.techniques.tread import TreadSpec

TRAINED = "trained"  # the dataset of the batches
ROUTE = {"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": 1}


@dataclass(frozen=True)
class TechniqueCase:
    """How a technique is tested.

    Attributes:
        neutral: specs that must equal plain training (`test_neutral.py`).
        runs: runs of `tests/training/lockstep.py` that use it, lora or full: two processes must
            train like one.
        settings: the keys that enable it there, if its datasets do not.
        apart: why two processes train differently from one, for a technique without runs.
    """

    neutral: Sequence[TechniqueSpec]
    runs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    apart: str = ""


def sampled(**settings: float) -> ScheduledSamplingSpec:
    """Scheduled sampling of every sample, unless a setting changes that."""
    chosen = {"max_step_offset": 5, "probability": 1.0, **settings}
    keys = {f"scheduled_sampling_{name}": value for name, value in chosen.items()}
    return ScheduledSamplingSpec(ScheduledSamplingConfig.model_validate(keys), steps=8, shift=None)


ALIGNED = {"crepa_enabled": True, "crepa_feature_source": "backbone"}

# By the name of the spec.
CASES: dict[str, TechniqueCase] = {
    "crepa": TechniqueCase(
        neutral=[
            CrepaSpec(
                CrepaConfig(
                    **ALIGNED, crepa_block_index=1, crepa_teacher_block_index=3, crepa_lambda=0
                )
            ),
        ],
        runs=("full",),
        settings={
            **ALIGNED,
            "crepa_block_index": 0,
            "crepa_teacher_block_index": 1,
            "crepa_similarity_threshold": 0.9,
        },
    ),
    "masked loss": TechniqueCase(
        neutral=[MaskedLossSpec(MaskedLossConfig(masked_loss_probability=0))],
        runs=("lora", "full"),
        settings={"masked_loss_prior": 0.5, "masked_loss_probability": 0.7},
    ),
    "preservation": TechniqueCase(
        neutral=[
            PreservationSpec(weight=0.0, probability=1.0),
            PreservationSpec(weight=1.0, probability=0.0),
        ],
        runs=("lora",),
        settings={
            "preservation_weight": 1.0,
            "preservation_probability": 0.5,
            "preservation_prompt": "a picture",
        },
    ),
    "regularisation": TechniqueCase(
        neutral=[RegularisationSpec(frozenset({"another"}))],
        runs=("lora",),
    ),
    "scheduled sampling": TechniqueCase(
        neutral=[sampled(max_step_offset=0), sampled(probability=0.0), sampled(start_step=9)],
        runs=("lora", "full"),
        settings={
            "scheduled_sampling_max_step_offset": 3,
            "scheduled_sampling_probability": 0.4,
            "validation_num_inference_steps": 8,
        },
    ),
    "slider": TechniqueCase(
        neutral=[SliderSpec({TRAINED: 1.0})],
        runs=("lora",),
    ),
    "tread": TechniqueCase(
        neutral=[TreadSpec([Route(0.0, 0, -1)])],
        runs=("full",),
        settings={"tread_config": {"routes": [ROUTE]}},
    ),
}
