"""What newcomers type is done, or answered with the command that works.

A folder where settings belong, words without --prompt, a step, names of other programs.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from simpletuner.cli.help import settings_help
from simpletuner.config.sources import parse_arguments
from simpletuner.planning.build import plan_training
from tests.tools.refusals import complaint
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]
COMMANDS = (
    ["caption"],
    ["dataset"],
    ["plan"],
    ["train"],
    ["cache", "verify"],
    ["cache", "fill"],
    ["cache", "gc"],
)


@pytest.fixture
def empty(workspace: Workspace) -> Workspace:
    """A folder with pictures and no configuration."""
    workspace.path("config/config.json").rename(workspace.path("config/elsewhere.txt"))
    workspace.path("config/multidatabackend.json").unlink()
    return workspace


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_folder_of_pictures_suggests_start(
    empty: Workspace, capsys: Capture, command: list[str]
) -> None:
    message = complaint(empty, capsys, *command, "datasets/pictures")

    assert message.startswith("datasets/pictures: is a folder of pictures or clips")
    assert "`simpletuner start datasets/pictures --dry-run` writes" in message


def test_the_suggested_start_command_works(empty: Workspace, capsys: Capture) -> None:
    start = [
        "start",
        "datasets/pictures",
        "--dry-run",
        "--yes",
        "--model",
        "demo",
        "--name",
        "mine",
    ]

    assert empty.run(*start) == 0, capsys.readouterr().err
    assert empty.run("dataset", "env=mine") == 0
    message = complaint(empty, capsys, "plan", "datasets/pictures")

    assert message == (
        "datasets/pictures: is a dataset of config/mine/config.json, not a setting; name that "
        "instead: env=mine."
    )


def test_a_folder_of_the_default_dataset_is_superfluous(
    workspace: Workspace, capsys: Capture
) -> None:
    message = complaint(workspace, capsys, "plan", "datasets/pictures")

    assert message.endswith(
        "is a dataset of config/config.json, not a setting; leave the folder out."
    )


@pytest.mark.slow(1)
def test_an_output_folder_suggests_its_configuration(workspace: Workspace, capsys: Capture) -> None:
    assert workspace.train("max_train_steps=1", "checkpoint_step_interval=1") == 0
    workspace.path("config/mine").mkdir()
    for name in ("config.json", "multidatabackend.json"):
        workspace.path(f"config/{name}").rename(workspace.path(f"config/mine/{name}"))
    of_name = complaint(workspace, capsys, "cache", "verify", "output")
    workspace.path("config/mine/config.json").unlink()
    of_file = complaint(workspace, capsys, "train", "output")

    assert of_name.endswith(
        "is the output folder of a run, not a setting; name the run's configuration instead: "
        "env=mine."
    )
    assert of_file.endswith("--config output/checkpoint-1/config.json.")


def test_the_output_folder_of_an_example_suggests_the_example(
    workspace: Workspace, capsys: Capture
) -> None:
    checkpoint = workspace.path("output/demo/checkpoint-1")
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")

    assert complaint(workspace, capsys, "train", "output/demo").endswith("instead: example=demo.")


def test_a_path_that_does_not_exist_is_called_so(workspace: Workspace, capsys: Capture) -> None:
    assert complaint(workspace, capsys, "train", "output/nothing").endswith(
        "does not exist, and is not a setting; write key=value, --key value or --flag."
    )


@pytest.mark.slow(1)
@pytest.mark.parametrize("resumed", ["1", "01", "checkpoint-1"])
def test_a_step_names_its_checkpoint(workspace: Workspace, resumed: str) -> None:
    assert workspace.train("max_train_steps=2", "checkpoint_step_interval=1") == 0

    with workspace.inside():
        plan = plan_training(
            parse_arguments(["max_train_steps=3", f"resume_from_checkpoint={resumed}"])
        )

    assert plan.resume is not None
    assert plan.resume.path.name == "checkpoint-1"


@pytest.mark.slow(1)
def test_words_after_the_output_folder_are_the_prompt(
    workspace: Workspace, capsys: Capture
) -> None:
    assert workspace.train("max_train_steps=1") == 0
    words = ["a", "red", "square", "steps=1", "--resolution", "128x128"]

    assert workspace.run("sample", "output", *words) == 0, capsys.readouterr().err

    assert [path.name[:12] for path in workspace.path("samples").glob("*.png")] == ["a_red_square"]


def test_words_beside_a_prompt_are_an_error(workspace: Workspace, capsys: Capture) -> None:
    workspace.path("output").mkdir()

    assert workspace.run("sample", "output", "words", "--prompt", "a red square") == 2
    assert "words: is not a setting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("cache clear", "cache gc --remove"),
        ("generate x", "sample"),
        ("ui", "server"),
        ("resume", "train"),
    ],
)
def test_commands_of_other_programs_get_a_suggestion(
    workspace: Workspace, capsys: Capture, typed: str, meant: str
) -> None:
    assert workspace.run(*shlex.split(typed)) == 2
    assert f"Did you mean `simpletuner {meant}`?" in capsys.readouterr().err


def test_an_example_is_copied_to_the_folder_after_its_name(
    workspace: Workspace, capsys: Capture
) -> None:
    assert workspace.run("examples", "copy", "demo", "config/mine") == 0
    assert workspace.path("config/mine/config.json").is_file()
    assert workspace.run("plan", "env=mine") == 0

    capsys.readouterr()
    assert workspace.run("examples", "copy", "demo", "config/mine") == 2
    assert (
        "choose another folder: simpletuner examples copy demo FOLDER." in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("word", "first"),
    [("rank", "lora_rank"), ("alpha", "lora_alpha"), ("dropout", "lora_dropout"), ("seed", "seed")],
)
def test_help_lists_keys_with_the_word_in_their_name_first(word: str, first: str) -> None:
    assert settings_help(word)[0].split()[0].removeprefix("--") == first


def test_a_folder_without_media_is_not_a_setting(
    workspace: Workspace, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "papers").mkdir()

    assert complaint(workspace, capsys, "plan", str(tmp_path / "papers")).endswith(
        "is not a setting; write key=value, --key value or --flag."
    )
