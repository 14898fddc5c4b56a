"""CREPA and scheduled sampling in a config: refusals, keys without effect, derived values."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from simpletuner.config.techniques.scheduled_sampling import ScheduledSamplingConfig
from tests.planning.test_checks import problems

SAMPLED = {"scheduled_sampling_max_step_offset": 3, "scheduled_sampling_probability": 0.5}


def test_a_crepa_teacher_must_follow_its_student() -> None:
    crepa = {"crepa_enabled": True, "crepa_feature_source": "backbone", "crepa_block_index": 4}
    errors, (warning,) = problems(**crepa, crepa_teacher_block_index=3)

    assert (errors, "3 comes before crepa_block_index 4" in warning) == ([], True)
    assert problems(**crepa, crepa_teacher_block_index=5) == ([], [])


def test_a_crepa_decay_must_end_after_it_begins() -> None:
    crepa = {
        "crepa_enabled": True,
        "crepa_feature_source": "backbone",
        "crepa_teacher_block_index": 3,
    }
    decays = {**crepa, "crepa_block_index": 1, "crepa_scheduler": "linear", "crepa_warmup_steps": 9}

    assert [printed[:44] for printed in problems(**decays, crepa_decay_steps=9)[1]] == [
        "crepa_decay_steps: 9 is not after crepa_warm"
    ]
    assert problems(**decays, crepa_decay_steps=10) == problems(**decays) == ([], [])


def test_an_offset_beyond_the_steps_of_previews_is_refused() -> None:
    sampling = {"scheduled_sampling_max_step_offset": 9, "scheduled_sampling_probability": 1}
    (error,), _ = problems(**sampling, validation_num_inference_steps=8)

    assert "scheduled_sampling_max_step_offset: 9 exceeds the 8 steps of" in error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"scheduled_sampling_max_step_offset": 3},
            "offset: has no effect: scheduled_sampling_probability is 0.",
        ),
        (
            {
                "scheduled_sampling_max_step_offset": 3,
                "scheduled_sampling_ramp_steps": 5,
                "scheduled_sampling_prob_end": 0,
            },
            "scheduled_sampling_max_step_offset: has no effect: probabilities are 0.",
        ),
        (
            {**SAMPLED, "scheduled_sampling_ramp_steps": 5},
            "scheduled_sampling_probability: has no effect",
        ),
    ],
)
def test_settings_without_effect_are_reported(settings: dict[str, Any], words: str) -> None:
    errors, (warning,) = problems(**settings)

    assert errors == []
    assert words in warning


def sampled(**settings: Any) -> ScheduledSamplingConfig:
    values = {"max_step_offset": 4, "probability": 0.5, **settings}
    return ScheduledSamplingConfig.model_validate(
        {f"scheduled_sampling_{key}": value for key, value in values.items()}
    )


def test_rollout_probability_follows_its_ramp() -> None:
    fixed = sampled(start_step=10)
    assert [fixed.probability_at(step) for step in (0, 9, 10, 99)] == [0, 0, 0.5, 0.5]

    ramp = sampled(start_step=10, ramp_steps=20, prob_start=0.0, prob_end=0.4)
    assert [ramp.probability_at(step) for step in (0, 10, 15, 20, 30, 99)] == pytest.approx(
        [0, 0, 0.1, 0.2, 0.4, 0.4]
    )

    cosine = sampled(ramp_steps=20, prob_start=0.2, prob_end=0.0, ramp_shape="cosine")
    assert [cosine.probability_at(step) for step in (0, 5, 10, 20)] == pytest.approx(
        [0.2, 0.17071, 0.1, 0], abs=1e-4
    )
    assert not sampled(ramp_steps=20, prob_start=0.0, prob_end=0.0).is_on, (
        "0 is 0, whatever the probability is"
    )


def test_rollout_offsets_follow_their_strategy() -> None:
    shares = [(index + 0.5) / 1000 for index in range(1000)]
    uniform = [sampled().offset_at(share) for share in shares]
    assert {offset: uniform.count(offset) for offset in set(uniform)} == dict.fromkeys(
        range(5), 200
    )

    early, late = (
        fmean(sampled(strategy=f"biased_{kind}").offset_at(s) for s in shares)
        for kind in ("early", "late")
    )
    assert early == pytest.approx(4 / 3, abs=0.1)
    assert late == pytest.approx(8 / 3, abs=0.1)


def test_mean_passes_count_rollouts_and_comparisons() -> None:
    assert sampled(reflexflow=False).mean_passes(100) == pytest.approx(0.5 * 4 / 2)
    assert sampled().mean_passes(100) == pytest.approx(0.5 * (2 + 0.8)), (
        "one of the plain input, if there is a way"
    )
    assert sampled(reflexflow_alpha=0).mean_passes(100) == pytest.approx(1)

    ramp = sampled(ramp_steps=100, prob_start=0, prob_end=1, reflexflow=False)
    assert ramp.mean_passes(100) == pytest.approx(1, abs=0.02)
