"""Keys of other trainers, and how near a suggestion has to be."""

from __future__ import annotations

import re
from typing import Any

import pytest

from simpletuner.config.datasets import dataset_options
from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import option_names
from simpletuner.config.upstream import NEUTRAL, instead_of, simpletuner_defaults
from simpletuner.errors import Problem, Problems

REQUIRED = [("model_type", "lora"), ("model_family", "kandinsky5-image")]


def problems_of(*settings: tuple[str, Any]) -> Problems:
    problems = Problems()
    problems.take(resolve([Layer("config.json", [*REQUIRED, *settings])]))
    return problems


def told(key: str, value: Any) -> Problem:
    (problem,) = problems_of((key, value))
    return problem


def test_no_key_is_ours_and_theirs() -> None:
    assert not instead_of("config").keys() & option_names().keys()


def test_a_key_of_simpletuner_at_its_own_default_asks_for_nothing() -> None:
    ours = option_names()
    foreign = {key: value for key, value in simpletuner_defaults().items() if key not in ours}
    assert len(foreign) > 100

    assert problems_of(*foreign.items()) == []


def test_defaults_that_are_written_as_text_ask_for_nothing_either() -> None:
    ours = option_names()
    foreign = [(f"--{key}", str(value)) for key, value in simpletuner_defaults().items() if key not in ours]

    assert problems_of(*foreign) == []


def test_a_key_of_simpletuner_that_asks_for_something_is_answered() -> None:
    ours = option_names()
    foreign = [key for key in simpletuner_defaults() if key not in ours]

    problems = problems_of(*((key, "something") for key in foreign))

    assert [problem.where for problem in problems] == foreign
    assert all(problem.fatal and "is not a key here: " in problem.message for problem in problems)


def test_every_setting_named_instead_exists() -> None:
    nested = {part for name in dataset_options() for part in name.split(".")}
    names = {*option_names(), *nested}
    words = [word for text in instead_of("config").values() for word in re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", text)]
    outside = {"adamw_bf16"}  # a value

    assert {word for word in words if word not in names} <= outside


@pytest.mark.parametrize("value", [False, "false", None, 0, "none", ""])
def test_a_feature_that_is_off_is_no_error(value: Any) -> None:
    problem = told("deepspeed", value)
    assert not problem.fatal
    assert "It is off and is ignored. (config.json)" in problem.message


@pytest.mark.parametrize("pair", NEUTRAL.items())
def test_what_is_done_anyway_is_no_error(pair: tuple[str, str]) -> None:
    assert not problems_of(pair).are_fatal


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
        ("main_process_ip", "10.0.0.1", "ACCELERATE_EXTRA_ARGS"),
        ("disable_multiline_split", True, "a key of a dataset"),
        ("max_upscale_threshold", 0.2, "a key of a dataset"),
        ("parquet_caption_column", "text", "the object parquet of a dataset"),
        ("context_parallel_size", 2, "sequence_parallel_size"),
        ("flux_guidance_mode", "random-range", "it is for another family of models"),
        ("MODEL_NAME", "x/y", "pretrained_model_name_or_path is its name"),
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
