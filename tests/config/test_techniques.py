"""LayerSync, MixFlow and scheduled sampling in a config: what is refused, what has no effect, and what follows."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest

from simpletuner.config.alignment import LayerSyncConfig
from simpletuner.config.techniques import Route, ScheduledSamplingConfig
from simpletuner.models.registry import FAMILIES
from tests.planning.test_checks import problems

GOOD = {"layersync_enabled": True, "layersync_student_block": 2, "layersync_teacher_block": 5}
SAMPLED = {"scheduled_sampling_max_step_offset": 3, "scheduled_sampling_probability": 0.5}


def of_layersync(routes: tuple[Route, ...] = (), blocks: int | None = 8, **settings: Any) -> list[str]:
    values = {key: value for key, value in {**GOOD, **settings}.items() if value is not None}
    config = LayerSyncConfig.model_validate(values)
    return [str(each) for each in config.check_model(FAMILIES["kandinsky5-image"], routes, blocks)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layersync_student_block": None}, "layersync_student_block: is required by layersync_enabled"),
        ({"layersync_teacher_block": 8}, "layersync_teacher_block: 8 is out of range: the model has 8 blocks, 0 to 7."),
        ({"layersync_teacher_block": 2}, "layersync_teacher_block: is the student block, too"),
        ({"routes": (Route(0.5, 1, 3), Route(0.5, 4, -1))}, "are in two routes of tread_config"),
    ],
)
def test_layersync_needs_two_blocks_of_the_model(settings: dict[str, Any], words: str) -> None:
    (only,) = of_layersync(**settings)
    assert words in only


def test_a_teacher_before_its_student() -> None:
    (told,) = of_layersync(layersync_teacher_block=1)
    assert "layersync_teacher_block: 1 comes before layersync_student_block 2" in told
    crepa = {"crepa_enabled": True, "crepa_feature_source": "backbone", "crepa_block_index": 4}
    errors, (warning,) = problems(**crepa, crepa_teacher_block_index=3)
    assert (errors, "3 comes before crepa_block_index 4" in warning) == ([], True)
    assert problems(**crepa, crepa_teacher_block_index=5) == ([], [])


def test_a_decay_that_ends_before_it_begins() -> None:
    crepa = {"crepa_enabled": True, "crepa_feature_source": "backbone", "crepa_teacher_block_index": 3}
    decays = {**crepa, "crepa_block_index": 1, "crepa_scheduler": "linear", "crepa_warmup_steps": 9}
    assert [told[:44] for told in problems(**decays, crepa_decay_steps=9)[1]] == [
        "crepa_decay_steps: 9 is not after crepa_warm"
    ]
    assert problems(**decays, crepa_decay_steps=10) == problems(**decays) == ([], [])


def test_layersync_that_is_right() -> None:
    assert of_layersync() == of_layersync(blocks=None) == []
    assert of_layersync(routes=(Route(0.5, 1, 3),)) == of_layersync(routes=(Route(0.5, 1, -1),)) == []
    assert LayerSyncConfig.model_validate(GOOD).weight("lora") == 0.002
    assert LayerSyncConfig.model_validate(GOOD).weight("full") == 0.2
    assert LayerSyncConfig.model_validate({**GOOD, "layersync_lambda": 0}).weight("full") == 0.0
    assert LayerSyncConfig().weight("lora") == 0.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mixflow_enabled": True, **SAMPLED}, "mixflow_enabled: cannot be combined with scheduled_sampling_max"),
        (
            {"scheduled_sampling_max_step_offset": 9, "scheduled_sampling_probability": 1,
             "validation_num_inference_steps": 8},
            "scheduled_sampling_max_step_offset: 9 exceeds the 8 steps of",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(settings: dict[str, Any], words: str) -> None:
    (error,), _ = problems(**settings)
    assert words in error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheduled_sampling_max_step_offset": 3}, "offset: has no effect: scheduled_sampling_probability is 0."),
        (
            {"scheduled_sampling_max_step_offset": 3, "scheduled_sampling_ramp_steps": 5,
             "scheduled_sampling_prob_end": 0},
            "scheduled_sampling_max_step_offset: has no effect: probabilities are 0.",
        ),
        ({**SAMPLED, "scheduled_sampling_ramp_steps": 5}, "scheduled_sampling_probability: has no effect"),
    ],
)  # fmt: skip
def test_what_has_no_effect(settings: dict[str, Any], words: str) -> None:
    errors, (warning,) = problems(**settings)
    assert errors == []
    assert words in warning


def sampled(**settings: Any) -> ScheduledSamplingConfig:
    values = {"max_step_offset": 4, "probability": 0.5, **settings}
    return ScheduledSamplingConfig.model_validate({f"scheduled_sampling_{key}": each for key, each in values.items()})


def test_probabilities() -> None:
    fixed = sampled(start_step=10)
    assert [fixed.probability_at(step) for step in (0, 9, 10, 99)] == [0, 0, 0.5, 0.5]
    ramp = sampled(start_step=10, ramp_steps=20, prob_start=0.0, prob_end=0.4)
    assert [ramp.probability_at(step) for step in (0, 10, 15, 20, 30, 99)] == pytest.approx([0, 0, 0.1, 0.2, 0.4, 0.4])
    cosine = sampled(ramp_steps=20, prob_start=0.2, prob_end=0.0, ramp_shape="cosine")
    assert [cosine.probability_at(step) for step in (0, 5, 10, 20)] == pytest.approx([0.2, 0.17071, 0.1, 0], abs=1e-4)
    assert not sampled(ramp_steps=20, prob_start=0.0, prob_end=0.0).is_on, "0 is 0, whatever the probability is"


def test_offsets() -> None:
    shares = [(index + 0.5) / 1000 for index in range(1000)]
    uniform = [sampled().offset_at(share) for share in shares]
    assert {offset: uniform.count(offset) for offset in set(uniform)} == dict.fromkeys(range(5), 200)
    early, late = (fmean(sampled(strategy=f"biased_{each}").offset_at(s) for s in shares) for each in ("early", "late"))
    assert early == pytest.approx(4 / 3, abs=0.1)
    assert late == pytest.approx(8 / 3, abs=0.1)


def test_extra_forward_passes() -> None:
    assert sampled(reflexflow=False).mean_passes(100) == pytest.approx(0.5 * 4 / 2)
    assert sampled().mean_passes(100) == pytest.approx(0.5 * (2 + 0.8)), "one of the plain input, if there is a way"
    assert sampled(reflexflow_alpha=0).mean_passes(100) == pytest.approx(1)
    ramp = sampled(ramp_steps=100, prob_start=0, prob_end=1, reflexflow=False)
    assert ramp.mean_passes(100) == pytest.approx(1, abs=0.02)
