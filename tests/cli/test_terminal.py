"""What the commands print first: the help, a plan, and its problems."""

from __future__ import annotations

import io
import re

import pytest

from simpletuner.cli.app import main
from simpletuner.cli.problems import print_problems
from simpletuner.errors import Problem
from tests.tools.refusals import complaint, warnings
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]


def plan(workspace: Workspace, capsys: Capture, *settings: str) -> str:
    capsys.readouterr()
    assert workspace.run("plan", *settings) == 0
    return capsys.readouterr().out


def test_help_begins_with_what_one_does_first(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    assert main([]) == 2

    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[0] for line in lines if re.match(r"  [\w-]", line)]
    assert listed[1:5] == ["start", "train", "plan", "server"]
    assert listed[-1] == "--install-completion"
    assert max(map(len, lines)) <= 80


def test_plan_begins_with_the_four_lines_of_a_run(workspace: Workspace, capsys: Capture) -> None:
    shown = plan(workspace, capsys)
    assert workspace.train() == 0
    trained = capsys.readouterr().out.splitlines()

    what, on_what, length, fits, gap = shown.splitlines()[:5]
    begin = trained.index(what)
    assert trained[begin + 1] == on_what
    assert length.startswith("  4 steps, about ")
    assert fits.startswith("  fits: up to ")
    assert gap == ""


def test_plan_fits_a_terminal_without_breaking_words(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix in (".png", ".txt"):
        file = workspace.path(f"datasets/pictures/p0{suffix}")
        file.rename(file.with_name(f"a-picture-with-{'a-very-' * 12}long-name{suffix}"))
    prompt = "a photo of a grey cat " * 8
    wide = set(plan(workspace, capsys, "--verbose", f"validation_prompt={prompt}").split())
    monkeypatch.setenv("COLUMNS", "80")

    shown = plan(workspace, capsys, "--verbose", f"validation_prompt={prompt}")

    assert max(map(len, shown.splitlines())) <= 80
    whole = {word for word in shown.split() if "…" not in word}
    assert {word for word in whole if not re.search(r"\d", word)} <= wide


def test_origin_of_settings_is_said_once(workspace: Workspace, capsys: Capture) -> None:
    shown = plan(workspace, capsys, "lora_rank=8")

    assert shown.count("config/config.json") == 1
    assert shown.count("command line") == 1


def test_resolution_that_no_dataset_is_trained_at_is_not_shown(
    workspace: Workspace, capsys: Capture
) -> None:
    assert "  resolution" not in plan(workspace, capsys, "--verbose")


def test_a_problem_that_two_checks_report_is_printed_once() -> None:
    stream = io.StringIO()
    problem = Problem("lora_rank", "must be 1 or more.")

    print_problems([problem, problem], stream)

    assert stream.getvalue().count("lora_rank") == 1


def test_every_problem_of_a_plan_is_printed_once_and_errors_come_first(
    workspace: Workspace, capsys: Capture
) -> None:
    assert workspace.run("plan", "lora_rank=1024", "--device-memory=0.001") == 2
    printed = capsys.readouterr()

    kinds = [line.partition(":")[0] for line in printed.err.splitlines()]
    assert kinds == ["error", "warning", "1 problem to fix (memory); nothing was started."]
    assert "narrowest layer" not in printed.out
    assert "peak memory" in printed.out, "the numbers that show why it does not fit"


def test_files_of_the_system_are_not_mentioned(workspace: Workspace, capsys: Capture) -> None:
    for name in (".DS_Store", "Thumbs.db", "desktop.ini", "._p0.png"):
        workspace.path(f"datasets/pictures/{name}").write_bytes(b"")

    shown = plan(workspace, capsys, "--verbose")

    assert "8 of 8 pictures used\n" in shown
    assert "DS_Store" not in shown
    assert "Thumbs" not in shown


def test_download_is_not_listed_as_a_cache(workspace: Workspace, capsys: Capture) -> None:
    workspace.write_config(pretrained_model_name_or_path=None)

    shown = plan(workspace, capsys, "--device-memory=80")

    assert re.search(r"^  Download of the model: about [\d.]+ GB$", shown, re.MULTILINE)
    assert not re.search(r"Cache.*download(ed)? first", shown)


@pytest.mark.parametrize(
    ("setting", "consequence"),
    [
        ("max_train_steps=100000", "100000 steps are 12,500 passes over the data."),
        ("checkpoint_step_interval=1", "1 saves 400 checkpoints"),
        ("validation_step_interval=1", "1 renders 401 rounds of previews"),
    ],
)
def test_length_or_interval_far_from_the_usual_is_a_warning_with_its_consequence(
    workspace: Workspace, capsys: Capture, setting: str, consequence: str
) -> None:
    usual = ("max_train_steps=400", "validation_disable=false", "checkpoint_step_interval=100")

    message = warnings(workspace, capsys, *usual, setting)

    assert consequence in message
    assert consequence not in warnings(workspace, capsys, *usual)


def test_temporary_files_of_a_plan_without_files_are_not_shown(
    workspace: Workspace, capsys: Capture
) -> None:
    workspace.path("datasets/pictures").rename(workspace.path("datasets/elsewhere"))

    shown = plan(workspace, capsys, "--device-memory=24")

    assert "does not exist yet: this is the plan for 10 pictures" in shown
    assert "simpletuner-nominal" not in shown


def test_missing_file_of_weights_is_not_taken_for_a_hub_id(
    workspace: Workspace, capsys: Capture
) -> None:
    weights = "pretrained_transformer_model_name_or_path=models/cat.safetensors"

    problem = complaint(workspace, capsys, "plan", weights)

    assert "'models/cat.safetensors' is a file; name a model folder, or a hub id" in problem


def test_few_of_many_allowed_words_are_listed(workspace: Workspace, capsys: Capture) -> None:
    problem = complaint(workspace, capsys, "plan", "optimizer=adam")

    assert "'adam' is not one of: adamw, " in problem
    assert re.search(
        r" and \d+ more\. Did you mean 'adamw'\? `simpletuner help optimizer`", problem
    )
    assert len(problem) < 200


def test_lora_of_another_model_is_refused_before_a_download(
    trained: Workspace, capsys: Capture
) -> None:
    file = trained.path("output/pytorch_lora_weights.safetensors")
    trained.write_config(pretrained_model_name_or_path=None, output_dir="output/other")

    problem = complaint(trained, capsys, "plan", f"init_lora={file}", "--device-memory=24")

    assert "is for other layers: " in problem
    assert "2560x2560 features in the model" in problem
