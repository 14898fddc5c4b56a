"""Keys of other trainers, and how near a suggestion has to be."""

from __future__ import annotations

from typing import Any

import pytest

from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import option_names
from simpletuner.config.upstream import NEUTRAL, instead_of
from simpletuner.errors import Problem, Problems

REQUIRED = [("model_type", "lora"), ("model_family", "kandinsky5-image")]


def told(key: str, value: Any) -> Problem:
    problems = Problems()
    problems.take(resolve([Layer("config.json", [*REQUIRED, (key, value)])]))
    (problem,) = problems
    return problem


def test_no_key_is_ours_and_theirs() -> None:
    assert not instead_of("config").keys() & option_names().keys()


@pytest.mark.parametrize("value", [False, "false", None, 0, "none", ""])
def test_a_feature_that_is_off_is_no_error(value: Any) -> None:
    problem = told("controlnet", value)
    assert not problem.fatal
    assert "It is off and is ignored. (config.json)" in problem.message


@pytest.mark.parametrize("pair", NEUTRAL.items())
def test_what_is_done_anyway_is_no_error(pair: tuple[str, str]) -> None:
    assert not told(*pair).fatal


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("controlnet", True, "control models are not supported"),
        ("--deepspeed-config", "zero2.json", "DeepSpeed is not supported; use enable_group_offload"),
        ("prediction_type", "v_prediction", "all families here are flow models"),
        ("rank", 8, "lora_rank is the rank of a LoRA"),
        ("blocks_to_swap", 20, "offload auto"),
        ("num_frames", 33, "a key of the object video of a dataset"),
        ("flow_custom_timesteps", "801,694", "timestep_sampling_offset"),
        ("gradient_checkpointing_backend", "unsloth", "gradient_checkpointing_interval"),
        ("disk_low_action", "wait", "disk_low_threshold"),
        ("validation_guidance_rescale", 0.7, "validation_guidance"),
        ("evaluation_type", "clip", "eval_steps_interval"),
        ("validation_lycoris_strength", 0.8, "`simpletuner sample --strength` renders"),
    ],
)
def test_a_feature_that_is_on_names_the_nearest_way(key: str, value: Any, words: str) -> None:
    problem = told(key, value)
    assert problem.fatal
    assert words in problem.message


@pytest.mark.parametrize(
    ("key", "guess"),
    [("learning_rte", "learning_rate"), ("lora_rnk", "lora_rank"), ("earning_rate", "learning_rate")],
)
def test_a_slip_of_the_keyboard_is_recognised(key: str, guess: str) -> None:
    assert f"Did you mean '{guess}'?" in told(key, 1).message


@pytest.mark.parametrize("key", ["speed_config", "webhook_confg_of_mine", "data_backend"])
def test_names_that_share_only_their_end_are_not_suggested(key: str) -> None:
    assert "tread_config" not in told(key, 1).message
