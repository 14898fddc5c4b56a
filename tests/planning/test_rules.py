"""What options declare about each other: one declaration gives warning, greyed field, error and
help.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.draft import Draft
from simpletuner.cli.help import explain_key
from simpletuner.config.load import Layer, resolve
from simpletuner.config.option import Option, When, unless, when
from simpletuner.config.schema import RunConfig, all_options
from simpletuner.errors import Problems
from simpletuner.planning.checks import check_config, check_conflicts, check_requirements
from tests.tools.reports import found_by

OPTIONS = all_options()
REQUIRED = {"model_type": "lora", "model_family": "kandinsky5-image"}
# Values that are on, of keys that are neither flags, choices nor numbers.
ON = {
    "webhook_config": {"webhook_type": "raw", "callback_url": "https://example.org/x"},
    "peft_lora_target_modules": "all-linear",
    "post_upload_script": "true",
    "tread_config": {
        "routes": [{"selection_ratio": 0.5, "start_layer_idx": 1, "end_layer_idx": -2}]
    },
}
ERROR_SAYS_MORE = "quantized_matmul"  # where the key is on without effect


def config(settings: dict[str, Any]) -> RunConfig:
    problems = Problems()
    made = resolve([Layer("config.json", list({**REQUIRED, **settings}.items()))], problems)
    assert problems == []
    return made


def on(option: Option) -> Any:
    """A value that is neither the default nor off."""
    if option.is_flag:
        return not option.default
    if option.choices:
        return next(choice for choice in option.choices if choice != option.default)
    if option.name in ON or option.type_name not in ("number", "integer"):
        return ON.get(option.name, "words")
    limits = option.limits
    low = max(limits.get("ge", 0), limits.get("gt", 0))
    below = limits.get("lt", 1e9)
    most = limits.get("le", 1e9)
    return next(
        each
        for each in (low + 1, low + 2, 0.5)
        if each != option.default and each <= most and each < below
    )


def off(option: Option, values: tuple[object, ...]) -> Any:
    """A value that is none of these; without any, one that is off."""
    if option.choices:
        return next(choice for choice in option.choices if choice not in values)
    return (
        None
        if not values and option.default is None
        else False
        if option.is_flag
        else 2
        if values
        else 0
    )


def state(condition: When, *, holds: bool) -> dict[str, Any]:
    """Settings with which a condition holds or not."""
    if condition.also is not None:
        return {
            **state(replace(condition, also=None), holds=holds),
            **state(condition.also, holds=True),
        }
    if holds != condition.negated:
        key, values = next(iter(condition.keys.items()))
        return {key: values[0] if values else OPTIONS[key].is_flag or on(OPTIONS[key])}
    return {key: off(OPTIONS[key], values) for key, values in condition.keys.items()}


REQUIREMENTS = [
    pytest.param(key, condition, id=f"{key}-{condition}")
    for key, option in OPTIONS.items()
    for condition in option.requires
    if condition.keys
]


def reports(settings: dict[str, Any], key: str) -> list[tuple[str, bool]]:
    return [
        (each.message, each.fatal) for each in check_config(config(settings)) if each.where == key
    ]


@pytest.mark.parametrize(("key", "lacking"), REQUIREMENTS)
def test_requirement_of_an_option_is_reported_unless_met(key: str, lacking: When) -> None:
    option = OPTIONS[key]
    met: dict[str, Any] = {}
    for condition in option.requires:
        met |= state(condition, holds=True)
    unmet_settings = {**met, **state(lacking, holds=False)}
    told = (lacking.lacking, lacking.fatal)
    assert (key, *told) in [
        (each.where, each.message, each.fatal)
        for each in found_by(check_requirements, config(unmet_settings))
    ]
    way_out = " Otherwise leave it out." if lacking.fatal else ""
    reported = (lacking.lacking + way_out, lacking.fatal)
    assert reports({**unmet_settings, key: on(option)}, key) == [reported] or key == ERROR_SAYS_MORE
    assert key not in [each.where for each in found_by(check_requirements, config(met))]
    assert reports(unmet_settings, key) == []
    assert reports({**unmet_settings, key: option.default}, key) == [], (
        "the default asks for nothing else"
    )
    assert str(lacking) in " ".join(" ".join(explain_key(option)).split())


def test_option_that_never_has_an_effect_gives_its_reason() -> None:
    keys = [
        key for key, option in OPTIONS.items() if any(not each.keys for each in option.requires)
    ]
    assert {"snr_gamma", "read_batch_size", "trust_remote_code"} <= set(keys)
    for key in keys:
        reason = OPTIONS[key].requires[-1].because
        assert reports({key: on(OPTIONS[key])}, key) == [(f"has no effect: {reason}.", False)]


@pytest.mark.parametrize(
    ("key", "other"),
    [(key, other) for key, option in OPTIONS.items() for other in option.excludes],
    ids=str,
)
def test_exclusion_of_an_option_is_reported_unless_alone(key: str, other: When) -> None:
    option = OPTIONS[key]
    alone = {key: on(option)}
    for condition in option.requires:
        alone |= state(condition, holds=True)
    both = {**alone, **state(other, holds=True)}
    (told,) = [each for each in found_by(check_conflicts, config(both)) if each.where == key]
    assert told.fatal
    value = f"{both[key]!r} " if option.choices else ""
    begin = f"{value}cannot be combined with {next(iter(other.keys))}"
    assert (told.message.startswith(begin), other.because in told.message) == (True, True)
    assert told in check_config(config(both))
    assert not [each for each in found_by(check_conflicts, config(alone)) if each.where == key]
    assert other.stated in " ".join(" ".join(explain_key(option)).split())


def test_conditions_name_known_keys_and_values() -> None:
    for option in OPTIONS.values():
        for condition in (*option.requires, *option.excludes):
            for key, values in condition.keys.items():
                known = OPTIONS[key].choices
                assert not known or set(values) <= set(known), (option.name, str(condition))


def test_conditions_read_as_sentences() -> None:
    settings = {"a": 0, "b": "", "c": "y"}
    assert str(when("a", "b", c=("x", "y"))) == "a, b or c x or y"
    assert when("a", "b", c=("x", "y")).holds(settings)
    assert not when("a", "b", c="x").holds(settings)
    assert unless("a", because="why").holds(settings)
    assert unless("c").lacking == "has no effect with c."
    assert when("a", fatal=True, because="why").lacking == "needs a: why."
    assert when(because="why").lacking == "has no effect: why."
    assert not when(because="why").holds(settings)


def test_first_of_several_reasons_is_reported(tmp_path: Path) -> None:
    values = {
        **REQUIRED,
        "model_type": "full",
        "lora_type": "lokr",
        "lora_dropout": 0.5,
        "crepa_lambda": 0.5,
    }
    judged = Draft(tmp_path / "config.json", values).judgement
    lora = "has no effect: model_type full trains every weight and no LoRA."
    assert [str(problem) for problem in judged.problems if problem.where == "lora_dropout"] == [
        f"lora_dropout: {lora}"
    ]
    assert (judged.without_effect["lora_dropout"], judged.without_effect["lora_alpha"]) == (
        lora,
        lora,
    )
    assert "crepa_lambda" not in [problem.where for problem in judged.problems], "it is the default"
