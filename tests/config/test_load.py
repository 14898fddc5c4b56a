"""Layers of settings become one config: precedence, aliases, variables and problems."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.config.load import Layer, resolve
from simpletuner.config.schema import FAMILY_DEFAULT, RunConfig, all_options, render_config
from simpletuner.config.sources import read_json_layer
from simpletuner.config.techniques.crepa import CrepaConfig
from simpletuner.errors import Problems, nearest

BASE = [("model_type", "lora"), ("model_family", "kandinsky5-image")]


def load(*values: tuple[str, object], last_wins: bool = False) -> tuple[RunConfig, list[str]]:
    """The config of one layer, and its problems as text; warnings begin with `warning: `."""
    problems = Problems()
    layer = Layer("config.json", [*BASE, *values], last_wins=last_wins)
    config = resolve([layer], problems)
    return config, [
        str(problem) if problem.fatal else f"warning: {problem}" for problem in problems
    ]


def test_dashes_and_aliases_lead_to_the_same_key() -> None:
    for spelling in (
        "checkpoint_step_interval",
        "--checkpoint-step-interval",
        "checkpointing_steps",
    ):
        config, problems = load((spelling, "20"))
        assert (config.checkpoints.checkpoint_step_interval, problems) == (20, [])


@pytest.mark.parametrize(("last_wins", "kept"), [(False, 2), (True, 5)])
def test_a_null_unsets_another_spelling_on_the_command_line_alone(
    last_wins: bool, kept: int
) -> None:
    config, _ = load(
        ("checkpoints_total_limit", 2), ("save_total_limit", None), last_wins=last_wins
    )

    assert config.checkpoints.checkpoints_total_limit == kept


def test_null_and_empty_text_mean_unset() -> None:
    config, problems = load(("learning_rate", None), ("tracker_run_name", ""), ("optimizer", ""))

    assert problems == []
    assert config.tracking.tracker_run_name == "simpletuner-testing"
    assert not config.is_explicit("learning_rate")


def test_an_empty_resume_from_checkpoint_means_none() -> None:
    assert load(("resume_from_checkpoint", ""))[0].run.resume_from_checkpoint == "none"
    assert load(("resume_from_checkpoint", None))[0].run.resume_from_checkpoint == "latest"


def test_the_strongest_layer_sets_the_value_and_its_origin() -> None:
    layers = [
        Layer("config.env", [*BASE, ("lora_rank", "8"), ("seed", "1")]),
        Layer("config.json", [("lora_rank", 32), ("train_batch_size", 2)]),
        Layer("command line", [("--train-batch-size", "3")], last_wins=True),
    ]
    problems = Problems()

    config = resolve(layers, problems, {"lora_rank": 4, "validation_guidance": 5.0})
    assert problems == []
    assert (config.lora.lora_rank, config.run.seed, config.schedule.train_batch_size) == (32, 1, 3)

    keys = ("validation_guidance", "seed", "lora_rank", "train_batch_size", "lora_alpha")
    assert [config.origins[key] for key in keys] == [
        FAMILY_DEFAULT,
        "config.env",
        "config.json",
        "command line",
        "default",
    ]
    assert [key for key in keys if config.is_explicit(key)] == [
        "seed",
        "lora_rank",
        "train_batch_size",
    ]


def test_unset_on_the_command_line_overrides_the_file() -> None:
    layers = [
        Layer("config.json", [*BASE, ("validation_guidance", 3), ("validation_prompt", "x")]),
        Layer(
            "command line", [("validation_guidance", ""), ("validation_prompt", "")], last_wins=True
        ),
    ]
    config = resolve(layers, Problems(), {"validation_guidance": 5.0})

    assert (config.validation.validation_guidance, config.validation.validation_prompt) == (
        5.0,
        None,
    )
    assert config.origins["validation_guidance"] == FAMILY_DEFAULT


def test_a_key_twice_in_a_file_is_an_error() -> None:
    _, problems = load(("lora_rank", 8), ("--lora_rank", 16))
    assert problems == ["lora_rank: is given twice: lora_rank=8 and --lora_rank=16 (config.json)."]

    _, problems = load(("save_total_limit", 3), ("checkpoints_total_limit", 4))
    assert problems == [
        "checkpoints_total_limit: is given twice: save_total_limit=3 and "
        "checkpoints_total_limit=4 (config.json)."
    ]
    assert load(("frame_rate", 24), ("framerate", "24.0"))[1] == []
    assert load(("lora_rank", 8), ("--lora_rank", None))[1] == []


def test_a_key_twice_on_the_command_line_is_a_correction() -> None:
    config, problems = load(("lora_rank", "8"), ("lora_rank", "16"), last_wins=True)
    assert config.lora.lora_rank == 16

    (problem,) = problems
    assert problem.startswith("warning: lora_rank: is given twice")
    assert problem.endswith("The last one is used.")

    config, problems = load(("lora_rank", "8"), ("lora_rank", None), last_wins=True)
    assert (config.lora.lora_rank, problems) == (16, [])


def test_environment_variables_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    config, problems = load(("output_dir", "{env:WHERE}/run"), ("instance_prompt", ["{env:WHERE}"]))
    assert problems == []
    assert config.run.output_dir == "/data/run"
    assert config.datasets.instance_prompt == ["/data"]

    monkeypatch.setenv("WHERE", "")
    assert load(("validation_prompt", "{env:WHERE}"))[0].validation.validation_prompt is None


def test_unset_environment_variables_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHERE", raising=False)
    _, problems = load(("output_dir", "{env:WHERE}/run"))

    assert problems == [
        "output_dir: '{env:WHERE}/run' needs the environment variable WHERE, which is not set."
    ]


def test_an_unknown_key_is_reported_with_the_nearest() -> None:
    _, problems = load(("learning_rte", 1), ("--zzzzzzzz", 1))
    assert problems == [
        "learning_rte: is not a known key. Did you mean 'learning_rate'? (config.json)",
        "--zzzzzzzz: is not a known key. (config.json)",
    ]


def test_all_problems_of_a_config_are_reported_at_once() -> None:
    _, problems = load(
        ("lora_rank", 0), ("seed", "x"), ("optimizer", "adamx"), ("nonsense", 1), ("output_dir", [])
    )
    assert sorted(problem.partition(":")[0] for problem in problems) == [
        "lora_rank",
        "nonsense",
        "optimizer",
        "output_dir",
        "seed",
    ]


def test_required_keys_are_explained() -> None:
    problems = Problems()
    resolve([Layer("config.json", [])], problems)

    assert [problem.where for problem in problems] == ["model_type", "model_family"]
    assert all(problem.message.startswith("is required. ") for problem in problems)
    assert [problem.to_json()["kind"] for problem in problems] == ["required"] * 2


def test_a_config_with_metadata_is_unwrapped(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"_metadata": {"name": "x"}, "config": {"seed": 1}}')
    problems = Problems()

    layer = read_json_layer(path, problems)

    assert layer is not None
    assert (list(layer.values), problems) == ([("seed", 1)], [])


@pytest.mark.parametrize(
    ("text", "kind"), [("[]", "a list"), ('"x"', "a text"), ("null", "null"), ("3", "a number")]
)
def test_a_config_must_be_an_object(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    problems = Problems()

    assert read_json_layer(path, problems) is None
    assert problems[0].message == f"must hold one JSON object, not {kind}."


def test_a_written_config_has_every_key() -> None:
    values = dict.fromkeys(all_options(), 1) | {"mine": 2, "lora_initialisation_style": "gaussian"}
    written = render_config(values)

    assert json.loads(written) == values
    assert list(json.loads(written))[-2:] == ["mine", "lora_initialisation_style"]


def test_only_the_first_unknown_keys_get_a_suggestion() -> None:
    """Suggestions take milliseconds; a file with thousands of unknown keys is not a config."""
    _, problems = load(*((f"learning_rte_{number}", 1) for number in range(200)))

    suggested = [problem for problem in problems if "Did you mean" in problem]

    assert len(problems) == 200
    assert suggested == problems[:50]


def test_very_long_words_get_no_suggestion() -> None:
    assert nearest("learning_rte", ["learning_rate"]) == "learning_rate"
    assert nearest("learning_rte" * 1000, ["learning_rate" * 1000]) is None


def test_chosen_values_reach_technique_groups() -> None:
    config, _ = load()

    chosen = config.with_values({"crepa_lambda": 0.25}, "chosen")

    assert chosen.techniques.of(CrepaConfig).crepa_lambda == 0.25
    assert (chosen.flat["crepa_lambda"], chosen.origins["crepa_lambda"]) == (0.25, "chosen")
    assert config.flat["crepa_lambda"] == 0.5
