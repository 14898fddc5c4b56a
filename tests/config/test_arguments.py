"""What is typed after `simpletuner train`, in all its forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner.config.load import Layer, resolve
from simpletuner.config.sources import EXTRA_ARGUMENTS, Arguments, parse_arguments
from simpletuner.config.techniques.tread import TreadConfig
from simpletuner.errors import ConfigError, Problems


@pytest.fixture(autouse=True)
def _no_extra_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(EXTRA_ARGUMENTS, raising=False)


def parse(*tokens: str) -> Arguments:
    arguments = parse_arguments(tokens)
    assert arguments.problems == []
    return arguments


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (["seed=1"], [("seed", "1")]),
        (["--seed=1"], [("--seed", "1")]),
        (["--seed", "1"], [("--seed", "1")]),
        (["--seed", "-1"], [("--seed", "-1")]),
        (["--use_ema"], [("--use_ema", True)]),
        (["--use_ema", "--seed", "1"], [("--use_ema", True), ("--seed", "1")]),
        (["--use_ema", "seed=1"], [("--use_ema", True), ("seed", "1")]),
        (["--use_ema", "sede=1"], [("--use_ema", True), ("sede", "1")]),
        (["--use-ema", "false"], [("--use-ema", "false")]),
        (["validation_prompt=a=b"], [("validation_prompt", "a=b")]),
        (["--validation_prompt", "x=5 and a cat"], [("--validation_prompt", "x=5 and a cat")]),
        (
            ["--optimizer_config", "weight_decay=0.1,eps=1e-7"],
            [("--optimizer_config", "weight_decay=0.1,eps=1e-7")],
        ),
        (["--validation_prompt="], [("--validation_prompt", "")]),
        (["validation_prompt=एक बिल्ली"], [("validation_prompt", "एक बिल्ली")]),
    ],
)
def test_settings_have_four_forms(tokens: list[str], settings: list[tuple[str, object]]) -> None:
    assert parse(*tokens).settings == settings


def test_selectors_are_not_settings() -> None:
    for tokens in (["env=mine"], ["--env", "mine"], ["--env=mine"]):
        arguments = parse(*tokens)
        assert (arguments.selectors, arguments.settings) == ({"env": "mine"}, [])
    assert parse("--example", "demo", "config-path=x").selectors == {
        "example": "demo",
        "config_path": "x",
    }


@pytest.mark.parametrize("token", ["foo", "=5", "--", "--=5", "-x"])
def test_stray_words_are_reported(token: str) -> None:
    problems = parse_arguments([token]).problems
    assert [str(problem) for problem in problems] == [
        f"{token}: is not a setting; write key=value, --key value or --flag."
    ]


def test_a_bare_name_of_a_config_is_answered_with_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config/cat").mkdir(parents=True)
    Path("config/cat/config.json").touch()
    for token in ("cat", "config/cat", "config/cat/config.json"):
        messages = [str(problem) for problem in parse_arguments([token]).problems]
        assert messages == [f"{token}: is not a setting. Did you mean env={token}?"]

    (told_of_example,) = parse_arguments(["demo"]).problems
    assert str(told_of_example) == "demo: is not a setting. Did you mean example=demo?"

    messages = [*map(str, parse_arguments(["push-to-hub", "lora_rank"]).problems)]
    assert messages == [
        "push-to-hub: needs a value: push-to-hub=true.",
        "lora_rank: needs a value: lora_rank=VALUE.",
    ]


def test_a_bare_word_is_reported_without_the_config_that_it_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = parse_arguments(["demo"])

    with pytest.raises(ConfigError) as caught:
        arguments.layers(arguments.problems)

    assert [problem.where for problem in caught.value.problems] == ["demo"]


def test_a_selector_without_a_value_is_an_error() -> None:
    problems = parse_arguments(["--env"]).problems
    assert [str(problem) for problem in problems] == ["--env: needs a value after it."]


def test_arguments_from_the_environment_follow_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(EXTRA_ARGUMENTS, "--seed=2  --use_ema\n--lora_rank 8")
    assert parse("--seed=1").settings == [
        ("--seed", "1"),
        ("--seed", "2"),
        ("--use_ema", True),
        ("--lora_rank", "8"),
    ]


@pytest.mark.parametrize(
    "tokens", [["tread_config=null"], ["--tread-config", "null"], ["--tread_config="]]
)
def test_null_on_the_command_line_unsets_a_key(tokens: list[str]) -> None:
    problems = Problems()
    file = Layer(
        "config.json",
        [("model_type", "lora"), ("model_family", "sanavideo"), ("tread_config", {"routes": []})],
    )

    config = resolve([file, parse(*tokens).layer()], problems)

    assert (config.techniques.of(TreadConfig).tread_config, problems) == (None, [])
