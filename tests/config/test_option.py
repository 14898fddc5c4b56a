"""One value at a time: the spellings that a key accepts, and the messages about all others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.load import LONGEST_CHOICE, Layer, build_group, resolve
from simpletuner.config.option import LARGEST_NUMBER
from simpletuner.config.schema import all_options
from simpletuner.errors import Problem, Problems

REQUIRED = {"model_type": "lora", "model_family": "kandinsky5-image"}
OPTIONS = all_options()
FLAGS = [option for option in OPTIONS.values() if option.is_flag]
CHOICES = [option for option in OPTIONS.values() if option.choices]
LIMITED = [option for option in OPTIONS.values() if option.limits]
NUMBERS = {
    whole: [
        option
        for option in OPTIONS.values()
        if option.type_name == ("integer" if whole else "number")
    ]
    for whole in (True, False)
}


def read(key: str, value: Any) -> tuple[Any, list[Problem]]:
    """The value of a config with this one setting, and its problems."""
    problems = Problems()
    config = resolve([Layer("config.json", list({**REQUIRED, key: value}.items()))], problems)
    return config.flat[key], problems


def test_flags_accept_common_words() -> None:
    for option in FLAGS:
        for word in (True, "true", "TRUE", "1", 1, "yes", "On"):
            assert read(option.name, word) == (True, []), (option.name, word)
        for word in (False, "false", "False", "0", 0, "no", "OFF"):
            assert read(option.name, word) == (False, []), (option.name, word)
        _, (problem,) = read(option.name, "maybe")
        assert str(problem) == f"{option.name}: 'maybe' is not true or false. (config.json)"


@pytest.mark.parametrize("text", ["10G", "10 gb", "10000M", "0.01TB", 10, "10"])
def test_sizes_on_disk_accept_common_units(text: Any) -> None:
    assert read("disk_low_threshold", text) == (pytest.approx(10), [])

    _, (problem,) = read("disk_low_threshold", f"{text} apples")
    assert "is not a size such as 10G or 500M" in problem.message


def test_a_wrong_word_is_reported_with_the_allowed_ones() -> None:
    for option in CHOICES:
        for word in option.choices:
            assert read(option.name, word) == (word, []), (option.name, word)
        value, (problem,) = read(option.name, option.choices[0] + "x")
        listed = [word for word in option.choices if word in problem.message]
        if len(option.choices) > LONGEST_CHOICE:
            assert f"`simpletuner help {option.name}` lists all." in problem.message
        else:
            assert listed == [*option.choices], problem
        assert "Did you mean '" in problem.message, problem
        assert value in option.choices, f"{option.name}: the rest is checked with the nearest word"


@pytest.mark.parametrize("whole", [True, False])
def test_numbers_may_be_numeric_text_only(whole: bool) -> None:
    for option in NUMBERS[whole]:
        good = next(number for number in (1, 0, 64) if within(number, option.limits))
        for spelling in (good, str(good), f"{good}.0", f"{float(good):e}"):
            assert read(option.name, spelling) == (good, []), (option.name, spelling)
        for bad in (
            "abc",
            True,
            [],
            {},
            "nan",
            "inf",
            "1e999",
            10**400,
            *(["1.5", 1.5] if whole else []),
        ):
            _, (problem,) = read(option.name, bad)
            assert problem.where == option.name, (option.name, bad)
            assert "is not a" in problem.message or "is too large" in problem.message, problem


def test_a_number_out_of_range_is_reported_with_its_limit() -> None:
    outside = {"ge": -1.0, "gt": -1.0, "le": 1.0, "lt": 1.0}
    for option in LIMITED:
        for bound, limit in option.limits.items():
            value = limit if bound in ("gt", "lt") else limit + outside[bound]
            _, (problem,) = read(
                option.name, int(value) if option.type_name == "integer" else value
            )
            end = f"is out of range; it must be {sign(bound)} {limit:.10g}. (config.json)"
            assert problem.message.endswith(end), (option.name, problem)


@pytest.mark.parametrize("whole", [True, False])
def test_absurd_numbers_are_refused_by_every_key(whole: bool) -> None:
    for option in NUMBERS[whole]:
        bound = min(
            option.limits.get("le", LARGEST_NUMBER), option.limits.get("lt", LARGEST_NUMBER)
        )
        messages = [problem.message for problem in read(option.name, 10**12)[1]]
        if option.name in ("seed", "validation_seed"):  # any number is one
            assert messages == [], option.name
        else:
            end = (
                f" is out of range; it must be {'<' if 'lt' in option.limits else '≤'} "
                f"{bound:.10g}. (config.json)"
            )
            assert [text.removeprefix("1000000000000").removeprefix(".0") for text in messages] == [
                end
            ], option.name


@pytest.mark.parametrize(
    "key", ["validation_num_inference_steps", "num_validation_images", "eval_timesteps"]
)
def test_absurd_preview_settings_are_refused(key: str) -> None:
    assert read(key, 1000) == (1000, [])

    (problem,) = read(key, 10**9)[1]
    assert "must be ≤ 1000" in problem.message


@pytest.mark.parametrize(
    "key", ["probability", "slider_strength", "timestep_sampling_offset", "start_step"]
)
def test_an_absurd_dataset_weight_is_refused(key: str) -> None:
    problems = Problems()
    build_group(DatasetConfig, {"id": "a", key: 10**12}, problems)

    assert [problem.where for problem in problems] == [key]


def within(number: float, limits: dict[str, float]) -> bool:
    at_least = limits.get("ge", -math.inf)
    at_most = limits.get("le", math.inf)
    return at_least <= number <= at_most and limits.get("gt", -math.inf) < number < limits.get(
        "lt", math.inf
    )


def sign(bound: str) -> str:
    return {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}[bound]


def test_defaults_are_allowed_values() -> None:
    for option in OPTIONS.values():
        if option.default is not None:
            assert read(option.name, option.default) == (option.default, []), option.name


def test_every_key_is_explained() -> None:
    assert [option.name for option in OPTIONS.values() if not option.help] == []


def test_every_alias_means_one_key() -> None:
    names = [word for option in OPTIONS.values() for word in (option.name, *option.aliases)]
    assert len(names) == len(set(names))


def test_large_integers_are_exact() -> None:
    assert read("seed", "9007199254740993") == (9007199254740993, [])
    assert read("seed", 2**63 - 1) == (2**63 - 1, [])

    _, (problem,) = read("seed", 2**63)
    assert "too large for a 64-bit number" in problem.message


def test_choices_that_look_like_numbers_may_be_numbers() -> None:
    assert read("aspect_bucket_alignment", 64) == ("64", [])
    assert read("fsdp_version", 2) == ("2", [])
    assert read("validation_resolution", 1024) == ("1024x1024", [])


@pytest.mark.parametrize(
    ("key", "path", "complaint"),
    [
        ("output_dir", "~nobody-of-that-name/output", "home folder of an unknown user"),
        ("output_dir", "a" * 5000, "File name too long"),
        ("output_dir", "a\0b", "a character that no path can have"),
        ("pretrained_transformer_subfolder", "a" * 300, "File name too long"),
    ],
)
def test_impossible_paths_are_refused(key: str, path: Any, complaint: str) -> None:
    _, (problem,) = read(key, path)

    assert complaint in problem.message
    assert len(problem.message) < 300, "a long value is cut"


def test_lists_may_be_json_or_comma_separated() -> None:
    for spelling in (["a", "b"], '["a", "b"]', "a, b"):
        assert read("eval_dataset_id", spelling) == (["a", "b"], [])
    assert read("eval_dataset_id", "one") == (["one"], [])
    assert read("instance_prompt", "a cat, sitting") == (["a cat, sitting"], [])

    _, (problem,) = read("eval_dataset_id", '["a", ')
    assert "is not valid JSON" in problem.message

    _, (problem,) = read("tread_config", "[" * 100_000)
    assert "cannot be used" in problem.message


@pytest.mark.parametrize("value", [10**18, "1e18"])
def test_steps_are_bounded(value: int | str) -> None:
    _, (problem,) = read("max_train_steps", value)

    assert "is out of range; it must be ≤ 1000000000." in problem.message


def test_repeats_are_bounded() -> None:
    problems = Problems()

    build_group(DatasetConfig, {"id": "a", "repeats": 100_000}, problems)

    assert [problem.where for problem in problems] == ["repeats"]
