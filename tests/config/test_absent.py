"""Keys of other trainers and of earlier versions, and how near a suggestion has to be."""

from __future__ import annotations

import re
from typing import Any

import pytest

from simpletuner.config.absent import (
    NEUTRAL,
    Removed,
    instead_of,
    removed_keys,
    removed_values,
    simpletuner_defaults,
)
from simpletuner.config.datasets import dataset_options
from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import option_names
from simpletuner.errors import Problem, Problems

REQUIRED = [("model_type", "lora"), ("model_family", "kandinsky5-image")]


def problems_of(*settings: tuple[str, Any]) -> Problems:
    problems = Problems()
    resolve([Layer("config.json", [*REQUIRED, *settings])], problems)
    return problems


def printed(key: str, value: Any) -> Problem:
    (problem,) = problems_of((key, value))
    return problem


def foreign_defaults() -> dict[str, Any]:
    """The settings of SimpleTuner that no version of this program had, with their defaults."""
    ours = {*option_names(), *removed_keys("config")}
    return {key: value for key, value in simpletuner_defaults().items() if key not in ours}


REMOVED = removed_keys("config")
SWITCHES = [key for key, row in REMOVED.items() if not row.part_of]
DETAILS = [key for key, row in REMOVED.items() if row.part_of]


def test_no_key_is_both_known_and_foreign() -> None:
    assert not instead_of("config").keys() & option_names().keys()


def test_no_removed_key_or_word_is_still_declared() -> None:
    assert not REMOVED.keys() & option_names().keys()
    assert not removed_keys("datasets").keys() & dataset_options().keys()
    for key, rows in removed_values("config").items():
        assert not rows.keys() & {*option_names()[key].choices}
    for key, rows in removed_values("datasets").items():
        assert not rows.keys() & {*dataset_options()[key].choices}


def test_simpletuner_keys_at_their_default_are_ignored() -> None:
    assert len(foreign_defaults()) > 100

    assert problems_of(*foreign_defaults().items()) == []


def test_simpletuner_defaults_written_as_text_are_ignored() -> None:
    written = [(f"--{key}", str(value)) for key, value in foreign_defaults().items()]

    assert problems_of(*written) == []


def test_simpletuner_keys_with_another_value_are_errors() -> None:
    foreign = [*foreign_defaults()]

    problems = problems_of(*((key, "something") for key in foreign))

    assert [problem.where for problem in problems] == foreign
    assert all(problem.fatal and "is not a key here: " in problem.message for problem in problems)


def test_every_replacement_is_a_known_setting() -> None:
    nested = {part for name in dataset_options() for part in name.split(".")}
    names = {*option_names(), *nested}
    texts = [
        *instead_of("config").values(),
        *(row.instead for row in removed_keys("config").values()),
    ]
    words = re.findall(r"\b[a-z]+(?:_[a-z0-9]+)+\b", " ".join(texts))
    outside = {"adamw_bf16"}  # a value

    assert {word for word in words if word not in names} <= outside


def test_removed_keys_in_use_are_refused_together() -> None:
    problems = problems_of(*((f"--{key}", "something") for key in SWITCHES))

    assert [problem.where for problem in problems] == [f"--{key}" for key in SWITCHES]
    assert all(problem.fatal for problem in problems)
    assert all(problem.message.startswith("was removed in 0.2.0: ") for problem in problems)


def test_removed_keys_that_are_off_are_ignored_with_a_warning() -> None:
    off = [(key, value) for key in SWITCHES for value in (None, *REMOVED[key].off)]

    for key, value in off:
        problem = printed(key, value)
        assert not problem.fatal, (key, value)
        assert problem.message.endswith("It is ignored. (config.json)")


def test_details_of_a_removed_mechanism_alone_are_ignored() -> None:
    problems = problems_of(*((key, "something") for key in DETAILS))

    assert not problems.are_fatal
    assert [problem.where for problem in problems] == DETAILS


@pytest.mark.parametrize("value", [False, "false", "no", 0, "0", ""])
def test_removed_switches_are_off_in_any_spelling(value: Any) -> None:
    assert Removed().asks_for_nothing(value)


@pytest.mark.parametrize("value", [True, "true", 1, "auto"])
def test_removed_switches_are_on_in_any_spelling(value: Any) -> None:
    assert not Removed().asks_for_nothing(value)


def test_a_removed_key_that_was_on_by_default_is_off_only_then() -> None:
    row = Removed(off=[True])

    assert row.asks_for_nothing("yes")
    assert not row.asks_for_nothing(False)


@pytest.mark.parametrize("value", [[], "[]", "[ ]"])
def test_an_empty_list_written_as_text_is_off(value: Any) -> None:
    assert Removed(off=[[]]).asks_for_nothing(value)


def test_removed_values_are_refused_with_a_replacement() -> None:
    for key, rows in removed_values("config").items():
        for word in rows:
            assert f"{word!r} was removed in 0.2.0: " in printed(key, word).message


@pytest.mark.parametrize("value", [False, "false", None, 0, "none", ""])
def test_foreign_features_that_are_off_are_ignored(value: Any) -> None:
    problem = printed("deepspeed", value)

    assert not problem.fatal
    assert "It is off and is ignored. (config.json)" in problem.message


@pytest.mark.parametrize("pair", NEUTRAL.items())
def test_foreign_keys_that_ask_for_our_default_are_ignored(pair: tuple[str, str]) -> None:
    assert not problems_of(pair).are_fatal


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("controlnet", True, "control models are not supported"),
        (
            "--deepspeed-config",
            "zero2.json",
            "DeepSpeed is not supported; use enable_group_offload",
        ),
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
def test_foreign_features_that_are_on_name_a_replacement(key: str, value: Any, words: str) -> None:
    problem = printed(key, value)

    assert problem.fatal
    assert words in problem.message


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("learning_rte", "learning_rate"),
        ("lora_rnk", "lora_rank"),
        ("earning_rate", "learning_rate"),
    ],
)
def test_typos_get_a_suggestion(key: str, guess: str) -> None:
    assert f"Did you mean '{guess}'?" in printed(key, 1).message


@pytest.mark.parametrize("key", ["speed_config", "webhook_confg_of_mine", "data_backend"])
def test_names_that_only_end_alike_are_not_suggested(key: str) -> None:
    assert "tread_config" not in printed(key, 1).message
