"""Which file a run takes its settings from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simpletuner.config.load import resolve
from simpletuner.config.sources import (
    ENV_VARIABLES,
    EXTRA_ARGUMENTS,
    LAUNCH_VARIABLES,
    dataset_file,
    example_file,
    example_names,
    expand_shell,
    locate,
)
from simpletuner.errors import ConfigError, Problem, Problems

REQUIRED = {"model_type": "lora", "model_family": "kandinsky5-image"}
CHOOSERS = (
    EXTRA_ARGUMENTS,
    *ENV_VARIABLES,
    "CONFIG_PATH",
    "CONFIG_BACKEND",
    "CONFIG_TYPE",
    "SIMPLETUNER_CONFIG_DIR",
    *LAUNCH_VARIABLES,
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and no variable that chooses anything."""
    for name in CHOOSERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path: str, **values: object) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{key}={value}\n" for key, value in values.items())
    if target.suffix == ".toml":
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    target.write_text(json.dumps(values) if target.suffix == ".json" else text)


def seed(**selectors: str) -> object:
    """The seed of the configuration that was found: the tests tell files apart by it."""
    problems = Problems()
    located = locate(selectors, problems)
    assert problems == []
    return resolve(located.layers, Problems()).run.seed


def refusal(**selectors: str) -> str:
    with pytest.raises(ConfigError) as caught:
        locate(selectors, Problems())
    return str(caught.value)


def test_default_locations_are_searched_in_order() -> None:
    put("config/config.env", SEED=1)
    assert seed() == 1

    put("config/config.toml", seed=2)
    assert seed() == 2

    put("config/config.json", seed=3)
    assert seed() == 3

    put("config.json", seed=4)
    assert seed() == 4


def test_a_missing_config_lists_the_paths_and_the_remedy() -> None:
    printed = refusal()
    assert (
        "tried config.json, config/config.json. Write one with `simpletuner configure`." in printed
    )


def test_existing_configs_are_suggested() -> None:
    put("config/cat/config.json")
    put("config/dog/config.json")

    assert "tried config.json, config/config.json. Choose one with env=NAME: cat, dog." in refusal()
    assert refusal(env="horse").endswith("Choose one with env=NAME: cat, dog.")


def test_env_means_a_folder_below_config() -> None:
    put("config/mine/config.json", seed=5)

    assert seed(env="mine") == 5
    assert seed(env="config/mine") == 5
    assert seed(env="config/mine/config.json") == 5


@pytest.mark.parametrize("variable", ENV_VARIABLES)
def test_the_config_may_be_chosen_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    put("config/mine/config.json", seed=5)
    put("config/other/config.json", seed=6)
    put("config/config.json", seed=7)

    monkeypatch.setenv(variable, "mine")
    assert seed() == 5
    assert seed(env="other") == 6
    assert seed(env="default") == 7
    assert seed(config_path="config/other/config.json") == 6, (
        "what is given counts for more than the environment"
    )

    monkeypatch.setenv(variable, "default")
    assert seed() == 7

    monkeypatch.setenv(variable, "nowhere")
    assert "config/nowhere/config.json" in refusal()


def test_simpletuner_config_dir_is_searched(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    put("elsewhere/mine/config.json", seed=8)
    monkeypatch.setenv("SIMPLETUNER_CONFIG_DIR", str(here / "elsewhere"))

    assert seed(env="mine") == 8
    assert str(here / "elsewhere/yours/config.json") in refusal(env="yours")


def test_config_paths_may_omit_their_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    put("here/it.json", seed=9)
    for path in ("here/it.json", "here/it"):
        monkeypatch.setenv("CONFIG_PATH", path)
        assert seed() == 9

    monkeypatch.setenv("CONFIG_PATH", "here/nothing")

    assert "tried here/nothing." in refusal()


def test_the_file_type_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    put("config/config.json", seed=1)
    put("config/config.toml", seed=2)

    monkeypatch.setenv("CONFIG_BACKEND", "toml")
    assert seed() == 2

    monkeypatch.setenv("CONFIG_BACKEND", "env")
    assert "config.json" not in refusal()

    monkeypatch.setenv("CONFIG_BACKEND", "jsn")
    assert "'jsn' is not one of: json, toml, env. Did you mean 'json'?" in refusal()


def test_packaged_examples_have_two_names() -> None:
    for selectors in ({"example": "demo"}, {"env": "examples/demo"}):
        located = locate(selectors, Problems())
        model = dict(located.layers[-1].values)["pretrained_model_name_or_path"]
        assert Path(str(model)) == example_file("demo", Problems()).parent / "checkpoint", (
            "paths lead into the package"
        )


def test_an_unknown_example_is_reported_with_the_known_ones() -> None:
    names = ", ".join(example_names())

    assert refusal(example="dmo") == (
        f"example: 'dmo' is not a packaged example. Available: {names}. Did you mean 'demo'?"
    )
    assert "not a packaged example" in refusal(example="../examples/demo")
    assert "not a packaged example" in refusal(env="examples/")


def test_two_ways_to_choose_a_config_are_an_error() -> None:
    problems = Problems()
    locate({"example": "demo", "env": "mine"}, problems)

    assert [str(problem) for problem in problems] == [
        "example: chooses a configuration, and so does env; give one of them."
    ]


def test_earlier_problems_are_kept() -> None:
    with pytest.raises(ConfigError) as caught:
        locate({"env": "nowhere"}, Problems([Problem("foo", "is not a setting")]))
    assert [problem.where for problem in caught.value.problems] == ["foo", "config"]


def test_config_json_overrides_config_env() -> None:
    put("config/config.json", seed=1)
    Path("config/config.env").write_text(
        "# for train.sh\nexport SEED=2\nLORA_RANK='8'  # small\nVALIDATION_PROMPT='a cat'\n"
        "VALIDATION_PROMPT+=' asleep'\nPATH=/bin\nMIXED_PRECISION=no\n"
    )

    config = resolve(locate({}, Problems()).layers, Problems())

    assert (config.run.seed, config.lora.lora_rank, config.precision.mixed_precision) == (
        1,
        8,
        "no",
    )
    assert config.validation.validation_prompt == "a cat asleep"
    assert config.origins["lora_rank"] == "config/config.env"


def test_config_env_is_parsed_like_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    put("config/config.json", **REQUIRED)
    monkeypatch.setenv("BASE", "/data/my pictures")
    Path("config/config.env").write_text(
        'WORK=$BASE/run\nOUTPUT_DIR="${WORK}/out"\n'
        "CACHE_DIR='$HOME'\nTRACKER_RUN_NAME=a\\ b#c # a comment\n"
        'VALIDATION_PROMPT="it\'s \\"red\\""\nthis is junk\nTHREADS=$(nproc)\nset -a\n'
    )
    problems = Problems()

    config = resolve(locate({}, problems).layers, problems)
    assert (config.run.output_dir, config.run.cache_dir) == ("/data/my pictures/run/out", "$HOME")
    assert (config.tracking.tracker_run_name, config.validation.validation_prompt) == (
        "a b#c",
        'it\'s "red"',
    )
    assert [problem.message for problem in problems if problem.fatal] == []

    printed = " ".join(problem.message for problem in problems)
    for words in (
        "line 6, 'this is junk', is not KEY=VALUE",
        "line 7 cannot be read: '$(' would run a",
        "line 8",
    ):
        assert words in printed


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('"a # b" # c', "a # b"),
        ("\"it's\" # don't", "it's"),
        ("\"say '$WORD' now\"", "say 'hop' now"),
        ("'$WORD # 1' # c", "$WORD # 1"),
    ],
)
def test_double_quotes_keep_other_quotes(written: str, value: str) -> None:
    assert expand_shell(written, {"WORD": "hop"}) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("SEED=$NOWHERE", "$NOWHERE is not set"),
        ("SEED=`date`", "would run a command"),
        ("SEED='1", "not closed"),
    ],
)
def test_unreadable_lines_of_config_env_are_errors(line: str, words: str) -> None:
    put("config/config.json", **REQUIRED)
    Path("config/config.env").write_text(line + "\n")
    problems = Problems()

    resolve(locate({}, problems).layers, problems)

    assert [words in problem.message for problem in problems if problem.fatal] == [True]


def test_config_env_may_extend_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    put("config/config.json", seed=1)
    Path("config/config.env").write_text(
        "TRAINER_EXTRA_ARGS='--use_ema --seed=2'\nTRAINER_EXTRA_ARGS+=' lora_rank=4'\n"
    )
    assert locate({}, Problems()).extra_arguments == "--use_ema --seed=2 lora_rank=4"

    monkeypatch.setenv("TRAINER_EXTRA_ARGS", "--use_ema")
    assert locate({}, Problems()).extra_arguments == "", "train.sh has put it into the environment"


def test_files_override_launch_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    put("config/config.json", seed=1)
    monkeypatch.setenv("MIXED_PRECISION", "fp16")
    monkeypatch.setenv("TRAINING_NUM_PROCESSES", "two")
    problems = Problems()

    config = resolve(locate({}, Problems()).layers, problems)
    assert config.precision.mixed_precision == "fp16"
    assert "num_processes: 'two' is not a whole number. (environment)" in map(str, problems)

    put("config/config.json", **REQUIRED, mixed_precision="no", num_processes=1)
    problems.clear()
    assert resolve(locate({}, Problems()).layers, problems).precision.mixed_precision == "no"
    assert problems == []


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.json", b'{"seed": 1', "is not valid JSON: "),
        ("config.json", b"[1]", "must hold one JSON object, not a list"),
        ("config.toml", b"seed = ", "is not valid TOML"),
        ("config.toml", b"seed = 1\nseed = 2", "is not valid TOML"),
        ("config.toml", b"a = '\xff'", "is not UTF-8 text"),
        ("config.env", b"SEED='1", "line 1 cannot be read: a quotation mark is not closed"),
        ("config.env", b"SEED=\xff", "is not UTF-8 text (byte 5)"),
    ],
)
def test_an_unreadable_config_is_the_only_problem(
    name: str, content: bytes, complaint: str
) -> None:
    Path(name).write_bytes(content)

    assert complaint in refusal()
    assert "is required" not in refusal()


def test_the_dataset_file_is_beside_the_config_by_default(here: Path) -> None:
    problems = Problems()

    assert dataset_file(None, Path("config"), problems) == Path("config/multidatabackend.json")
    assert [problem.fatal for problem in problems] == [False]
    assert dataset_file(
        "config/examples/demo/multidatabackend.json", Path("config"), Problems()
    ).is_file()
    assert dataset_file("mine.json", Path("config"), Problems()) == Path("mine.json")


@pytest.mark.parametrize(("asked", "chosen"), [("mine", "mine"), ("", "of-the-file")])
def test_train_sh_uses_the_requested_config(tmp_path: Path, asked: str, chosen: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.env").write_text("ENV=of-the-file\nSEED=2\n")
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/python").symlink_to(sys.executable)
    (tmp_path / "venv/bin/simpletuner").write_text('#!/bin/sh\necho "$1 $ENV $SEED"\n')
    (tmp_path / "venv/bin/simpletuner").chmod(0o755)
    given = {**os.environ, "VENV_PATH": str(tmp_path / "venv"), "ENV": asked}
    script = Path(__file__).parents[2] / "train.sh"

    done = subprocess.run(
        [script], cwd=tmp_path, env=given, capture_output=True, text=True, check=True
    )

    assert done.stdout == f"train {chosen} 2\n"
