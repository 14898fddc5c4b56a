"""What options declare about each other appears as warning, greyed field, error and help."""

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
    config = resolve([Layer("config.json", list({**REQUIRED, **settings}.items()))], problems)
    assert problems == []
    return config


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
    for number in (low + 1, low + 2, 0.5):
        if number != option.default and number <= most and number < below:
            return number
    raise AssertionError(f"{option.name} has another range")


def off(option: Option, values: tuple[object, ...]) -> Any:
    """A value that is none of some values; without any, a value that is off."""
    if option.choices:
        return next(choice for choice in option.choices if choice not in values)
    if not values and option.default is None:
        return None
    if option.is_flag:
        return False
    return 2 if values else 0


def state(condition: When, *, holds: bool) -> dict[str, Any]:
    """Settings with which a condition holds or not."""
    if condition.also is not None:
        settings = state(replace(condition, also=None), holds=holds)
        return settings | state(condition.also, holds=True)
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
    """(message, whether it is an error) of the problems of a key."""
    problems = check_config(config(settings))
    return [(problem.message, problem.fatal) for problem in problems if problem.where == key]


@pytest.mark.parametrize(("key", "lacking"), REQUIREMENTS)
def test_requirement_of_an_option_is_reported_unless_met(key: str, lacking: When) -> None:
    option = OPTIONS[key]
    met: dict[str, Any] = {}
    for condition in option.requires:
        met |= state(condition, holds=True)
    unmet = {**met, **state(lacking, holds=False)}
    way_out = " Otherwise leave it out." if lacking.fatal else ""
    report = (lacking.lacking + way_out, lacking.fatal)

    problems = found_by(check_requirements, config(unmet))
    problems_if_met = found_by(check_requirements, config(met))

    assert (key, lacking.lacking, lacking.fatal) in [
        (problem.where, problem.message, problem.fatal) for problem in problems
    ]
    assert key not in [problem.where for problem in problems_if_met]
    assert reports({**unmet, key: on(option)}, key) == [report] or key == ERROR_SAYS_MORE
    assert reports(unmet, key) == []
    assert reports({**unmet, key: option.default}, key) == [], "a default needs nothing"
    assert str(lacking) in " ".join(" ".join(explain_key(option)).split())


def test_option_that_never_has_an_effect_gives_its_reason() -> None:
    keys = []
    for key, option in OPTIONS.items():
        if any(not condition.keys for condition in option.requires):
            keys.append(key)
    assert {"snr_gamma", "read_batch_size", "trust_remote_code"} <= set(keys)

    for key in keys:
        reason = OPTIONS[key].requires[-1].because
        assert reports({key: on(OPTIONS[key])}, key) == [(f"has no effect: {reason}.", False)]


@pytest.mark.parametrize(
    ("key", "excluded"),
    [(key, excluded) for key, option in OPTIONS.items() for excluded in option.excludes],
    ids=str,
)
def test_exclusion_of_an_option_is_reported_unless_alone(key: str, excluded: When) -> None:
    option = OPTIONS[key]
    alone = {key: on(option)}
    for condition in option.requires:
        alone |= state(condition, holds=True)
    both = {**alone, **state(excluded, holds=True)}

    conflicts = found_by(check_conflicts, config(both))
    conflicts_alone = found_by(check_conflicts, config(alone))

    (problem,) = [problem for problem in conflicts if problem.where == key]
    value = f"{both[key]!r} " if option.choices else ""
    assert problem.fatal
    assert problem.message.startswith(f"{value}cannot be combined with {next(iter(excluded.keys))}")
    assert excluded.because in problem.message
    assert problem in check_config(config(both))
    assert key not in [problem.where for problem in conflicts_alone]
    assert excluded.stated in " ".join(" ".join(explain_key(option)).split())


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
    reason = "has no effect: model_type full trains every weight and no LoRA."

    judgement = Draft(tmp_path / "config.json", values).judgement

    messages = [
        problem.message for problem in judgement.problems if problem.where == "lora_dropout"
    ]
    assert messages == [reason]
    assert judgement.without_effect["lora_dropout"] == reason
    assert judgement.without_effect["lora_alpha"] == reason
    keys = [problem.where for problem in judgement.problems]
    assert "crepa_lambda" not in keys, "it has its default"
