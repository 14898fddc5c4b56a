"""A run that continues from an earlier checkpoint branches; later steps are set aside, not lost."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.sampling import SampleRequest, plan_evaluation, plan_samples
from simpletuner.cli.app import main
from simpletuner.config.sources import parse_arguments
from simpletuner.errors import UserError
from simpletuner.headers import METADATA, read_header
from simpletuner.planning import checkpoint_folder, lineage
from simpletuner.planning.checkpoint_folder import (
    LINE_FILE,
    STARS_FILE,
    SWEEP_FOLDER,
    find_checkpoints,
    open_checkpoint,
)
from simpletuner.planning.lock import at_work, this_process
from simpletuner.weights.lora_names import LORA_FILE
from simpletuner.weights.published_lora import OFFICIAL_SETTINGS
from tests.conftest import make_room
from tests.tools.runs import LORA, assert_equal, training_state
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow(3)

Capture = pytest.CaptureFixture[str]
THOROUGH = pytest.mark.thorough
SIX_CHECKPOINTS: dict[str, Any] = {
    "max_train_steps": 6,
    "checkpoint_step_interval": 1,
    "checkpoints_total_limit": 0,
}
# A branch with this rate has other weights than the steps that it leaves.
OTHER_RATE = "learning_rate=5e-3"
FROM_2 = "resume_from_checkpoint=checkpoint-2"
FROM_3 = "resume_from_checkpoint=checkpoint-3"
FROM_OLD_6 = "resume_from_checkpoint=branches/1/checkpoint-6"
PREVIEW_SETTINGS = (
    "validation_disable=false",
    "validation_step_interval=2",
    "disable_benchmark=true",
    "validation_disable_unconditional=true",
)


def checkpoints(run: Workspace, folder: str = "output") -> list[str]:
    """The names of the checkpoints in a folder, by their steps."""
    names = [path.name for path in run.path(folder).glob("checkpoint-*")]
    return sorted(names, key=lambda name: int(name.split("-")[1]))


def recorded_steps(run: Workspace) -> list[int]:
    return [row["step"] for row in run.metrics()]


def result_step(file: Path) -> str:
    return str(read_header(file)[METADATA]["simpletuner.step"])


def assert_same_run(actual: Workspace, expected: Workspace, step: int) -> None:
    """Two runs have the same checkpoints, record and result, bit for bit."""
    assert checkpoints(actual) == checkpoints(expected)
    assert actual.metrics() == expected.metrics()
    assert_equal(training_state(actual, step), training_state(expected, step))
    assert actual.path(LORA).read_bytes() == expected.path(LORA).read_bytes()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, encoded: Workspace) -> Workspace:
    """A finished run with a checkpoint of each of its six steps."""
    run = encoded.copy(tmp_path_factory.mktemp("old") / "run", **SIX_CHECKPOINTS)
    with pytest.MonkeyPatch.context() as patch:
        make_room(patch)
        assert run.train() == 0
    return run


@pytest.fixture
def run(tmp_path: Path, old: Workspace) -> Workspace:
    return old.copy(tmp_path / "run")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, old: Workspace) -> Workspace:
    """What a branch at step 3 must equal: a run that had ended at step 3."""
    run = old.stopped(tmp_path_factory.mktemp("straight") / "run", 3)
    with pytest.MonkeyPatch.context() as patch:
        make_room(patch)
        assert run.train(OTHER_RATE, "max_train_steps=5") == 0
        assert run.train(OTHER_RATE, "max_train_steps=7") == 0
    return run


def test_a_branch_equals_a_run_that_never_trained_the_later_steps(
    run: Workspace, straight: Workspace
) -> None:
    assert run.train(OTHER_RATE, "max_train_steps=5", FROM_3) == 0
    assert run.train(OTHER_RATE, "max_train_steps=7") == 0

    assert_same_run(run, straight, 7)
    assert recorded_steps(run) == [1, 2, 3, 4, 5, 6, 7]


def test_plan_and_status_show_the_step_an_interrupted_run_continues_from(
    tmp_path: Path, old: Workspace, capsys: Capture
) -> None:
    """The run ended unexpectedly at step 6, and its last checkpoint is of step 4."""
    interrupted = old.stopped(tmp_path / "interrupted", 4)
    interrupted.path("output/events.jsonl").unlink()

    assert interrupted.run("plan", "max_train_steps=8") == 0
    # The lock of a process that does not exist: ids end below 2^22.
    owner = replace(this_process(), pid=2**22 + 1)
    interrupted.path("output/run.lock").write_text(json.dumps(asdict(owner)))
    status = Run("run", interrupted.path("output"), written_by="config").status()

    plan = capsys.readouterr().out
    assert "continues from step 4; 2 steps are trained again (checkpoint-4)" in plan
    expected = "Ended unexpectedly at step 6. It continues from step 4; 2 steps are trained again."
    assert status["message"] == expected


def test_later_checkpoints_move_to_a_branch_folder_and_are_listed(
    run: Workspace, old: Workspace, capsys: Capture
) -> None:
    assert run.train("max_train_steps=4", FROM_3) == 0

    output = capsys.readouterr().out
    moved = "checkpoint-4, checkpoint-5, checkpoint-6, the result of step 6"
    assert f"moves to branches/1: {moved}" in output
    assert "Without resume_from_checkpoint, it continues from checkpoint-6 instead." in output
    assert f"set {FROM_OLD_6}" in output
    assert checkpoints(run, "output/branches/1") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    branch = run.path("output/branches/1")
    assert (branch / LORA_FILE).read_bytes() == old.path(LORA).read_bytes()
    assert (branch / OFFICIAL_SETTINGS).is_file(), "Kandinsky's program reads it beside the LoRA"
    assert run.metrics("output/branches/1") == old.metrics()


def test_a_finished_branch_stays_the_result(run: Workspace, capsys: Capture) -> None:
    assert run.train("max_train_steps=4", FROM_3) == 0
    result = run.path(LORA).read_bytes()
    capsys.readouterr()

    assert run.train("max_train_steps=4") == 0

    assert "This run is finished: 4 steps are done" in capsys.readouterr().out
    assert run.path(LORA).read_bytes() == result
    assert result_step(run.path(LORA)) == "4"


def test_a_branch_can_branch_again(run: Workspace) -> None:
    assert run.train(OTHER_RATE, "max_train_steps=6", FROM_2) == 0
    assert run.train("max_train_steps=5", "resume_from_checkpoint=checkpoint-4") == 0
    assert run.train("max_train_steps=6") == 0

    newest = find_checkpoints(run.path("output"))[0][-1].manifest
    assert [(fork.step, fork.number) for fork in newest.forks] == [(2, 1), (4, 2)]
    assert recorded_steps(run) == [1, 2, 3, 4, 5, 6]
    assert checkpoints(run, "output/branches/1") == [
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-5",
        "checkpoint-6",
    ]
    assert checkpoints(run, "output/branches/2") == ["checkpoint-5", "checkpoint-6"]


def test_a_run_can_return_to_a_branch_that_was_set_aside(
    run: Workspace, old: Workspace, tmp_path: Path
) -> None:
    longer = old.copy(tmp_path / "longer")
    assert longer.train("max_train_steps=7") == 0

    assert run.train(OTHER_RATE, "max_train_steps=5", FROM_3) == 0
    assert run.train("max_train_steps=7", FROM_OLD_6) == 0

    assert_same_run(run, longer, 7)
    assert checkpoints(run, "output/branches/2") == ["checkpoint-4", "checkpoint-5"]
    assert result_step(run.path(f"output/branches/2/{LORA_FILE}")) == "5"


def test_pruning_counts_only_checkpoints_of_the_current_branch(run: Workspace) -> None:
    assert run.train("max_train_steps=5", "checkpoints_total_limit=2", FROM_3) == 0

    assert checkpoints(run) == ["checkpoint-4", "checkpoint-5"]
    assert checkpoints(run, "output/branches/1") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]


@THOROUGH
def test_checkpoints_without_branch_records_continue_in_step_order(run: Workspace) -> None:
    """Earlier versions recorded no forks."""
    for path in run.path("output").glob("checkpoint-*/manifest.json"):
        content = json.loads(path.read_text())
        del content["forks"]
        path.write_text(json.dumps(content))

    assert run.train("max_train_steps=7") == 0
    assert recorded_steps(run) == [1, 2, 3, 4, 5, 6, 7]

    assert run.train("max_train_steps=5", FROM_3) == 0
    assert checkpoints(run) == [f"checkpoint-{step}" for step in (1, 2, 3, 4, 5)]


def test_sweep_and_sample_use_the_checkpoints_of_the_current_branch(run: Workspace) -> None:
    assert run.train("max_train_steps=4", FROM_2) == 0

    with run.inside():
        arguments = parse_arguments([])
        prompts = ["a star"]
        sweep = SampleRequest("output", "sweep", arguments, prompts, sweeps=True)
        _, swept = plan_samples(sweep)
        latest = SampleRequest("output", "samples", arguments, prompts, checkpoints=["latest"])
        _, sampled = plan_samples(latest)

    assert [weights.step for weights in swept] == [1, 2, 3, 4]
    assert [weights.step for weights in sampled] == [4]


def test_previews_and_the_wandb_run_move_with_their_branch(run: Workspace) -> None:
    shutil.rmtree(run.path("output"))
    assert run.train("max_train_steps=4", *PREVIEW_SETTINGS) == 0
    run.path("output/wandb_run.json").write_text('{"id": "old"}')
    picture = "validation_images/step_4_validation_0_128x128.png"
    before = run.path(f"output/{picture}").read_bytes()

    assert run.train("max_train_steps=4", OTHER_RATE, FROM_2, *PREVIEW_SETTINGS) == 0

    assert run.path(f"output/branches/1/{picture}").read_bytes() == before
    assert run.path(f"output/{picture}").read_bytes() != before
    assert json.loads(run.path("output/branches/1/wandb_run.json").read_text()) == {"id": "old"}
    assert not run.path("output/wandb_run.json").exists(), "the branch is another W&B run"
    rows = run.path("output/validation_media.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [2, 4]


def write_comparison(folder: Path, name: str) -> None:
    """A sweep and stars, in which the weights that were compared are named by their steps."""
    (folder / SWEEP_FOLDER).mkdir()
    (folder / SWEEP_FOLDER / "sheet.json").write_text(name)
    (folder / STARS_FILE).write_text(name)


def comparison_in(folder: Path) -> list[str]:
    files = [folder / SWEEP_FOLDER / "sheet.json", folder / STARS_FILE]
    return [file.read_text() for file in files if file.exists()]


def test_a_comparison_goes_and_returns_with_its_branch(run: Workspace, capsys: Capture) -> None:
    output = run.path("output")
    write_comparison(output, "old")

    assert run.train("max_train_steps=4", FROM_3) == 0
    assert "the result of step 6, the comparison of checkpoints." in capsys.readouterr().out
    assert comparison_in(output) == []
    assert comparison_in(output / "branches/1") == ["old", "old"]

    write_comparison(output, "new")
    assert run.train("max_train_steps=7", FROM_OLD_6) == 0
    assert comparison_in(output) == ["old", "old"]
    assert comparison_in(output / "branches/2") == ["new", "new"]


def test_a_comparison_behind_a_relative_link_goes_and_returns(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/sheet.json").touch()
    (tmp_path / "output").mkdir()
    (tmp_path / "output/sweep").symlink_to("../disk")

    lineage._move(tmp_path / "output/sweep", tmp_path / "output/branches/1/sweep")
    assert (tmp_path / "output/branches/1/sweep/sheet.json").exists()

    lineage._move(tmp_path / "output/branches/1/sweep", tmp_path / "output/sweep")
    assert (tmp_path / "output/sweep/sheet.json").exists()
    assert (tmp_path / "disk/sheet.json").exists()


def test_a_comparison_stays_aside_if_its_line_is_trained_anew_from_an_earlier_step(
    run: Workspace,
) -> None:
    write_comparison(run.path("output"), "old")
    assert run.train("max_train_steps=4", FROM_3) == 0

    assert run.train("max_train_steps=6", "resume_from_checkpoint=branches/1/checkpoint-5") == 0

    assert comparison_in(run.path("output")) == []
    assert comparison_in(run.path("output/branches/1")) == ["old", "old"]


def test_a_branch_waits_for_the_comparison_of_its_checkpoints(
    run: Workspace, capsys: Capture
) -> None:
    output = run.path("output")
    write_comparison(output, "old")

    with at_work(output / SWEEP_FOLDER):
        assert run.train("max_train_steps=4", FROM_3) == 2
        assert "are being compared by process" in capsys.readouterr().err
        with pytest.raises(UserError, match="being compared by"):
            lineage.start_line(output, open_checkpoint(output / "checkpoint-3"))
        assert run.train("max_train_steps=7") == 0  # no branch

    assert comparison_in(output) == ["old", "old"]


def test_a_comparison_of_a_branch_measures_losses_where_its_start_was_set(run: Workspace) -> None:
    assert run.train("max_train_steps=4", FROM_3) == 0
    sweep = run.path("output") / SWEEP_FOLDER
    sweep.mkdir()

    with run.inside(), at_work(sweep):
        plan = plan_evaluation(Path("output"), parse_arguments([]))

    assert plan.resume is not None
    assert plan.resume.step == 4


def train_and_die_moving(moves: int, *settings: str) -> None:
    """Train, and end without any cleanup when this many files have moved."""
    move = lineage._move
    moved: list[Path] = []

    def move_or_die(path: Path, target: Path) -> None:
        if path.exists():
            if len(moved) == moves:
                os._exit(9)
            moved.append(path)
        move(path, target)

    lineage._move = move_or_die
    main(["train", *settings])


def kill_while_moving(run: Workspace, moves: int, *settings: str) -> None:
    process = run.fork(train_and_die_moving, moves, *settings)
    process.join()
    assert process.exitcode == 9


@pytest.mark.parametrize(
    "moves",
    [
        pytest.param(0, marks=THOROUGH),
        1,
        pytest.param(3, marks=THOROUGH),
        pytest.param(6, marks=THOROUGH),
    ],
)
def test_a_kill_while_files_move_does_not_change_the_branch(
    run: Workspace, straight: Workspace, moves: int
) -> None:
    write_comparison(run.path("output"), "old")

    kill_while_moving(run, moves, OTHER_RATE, "max_train_steps=5", FROM_3)

    assert run.train(OTHER_RATE, "max_train_steps=5") == 0
    assert run.train(OTHER_RATE, "max_train_steps=7") == 0

    assert_same_run(run, straight, 7)
    assert checkpoints(run, "output/branches/1") == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    assert comparison_in(run.path("output/branches/1")) == ["old", "old"]


@THOROUGH
@pytest.mark.parametrize("moves", [1, 3, 5])
def test_a_kill_while_returning_to_a_branch_does_not_change_the_result(
    run: Workspace, old: Workspace, tmp_path: Path, moves: int
) -> None:
    longer = old.copy(tmp_path / "longer")
    assert longer.train("max_train_steps=7") == 0
    assert run.train(OTHER_RATE, "max_train_steps=5", FROM_3) == 0

    kill_while_moving(run, moves, "max_train_steps=7", FROM_OLD_6)
    assert run.train("max_train_steps=7") == 0

    assert_same_run(run, longer, 7)
    branches = {path.name for path in run.path("output/branches").iterdir()}
    assert branches == {"1", "2"}, "no further branch"


def test_a_branch_that_was_killed_at_its_start_is_not_announced_twice(
    run: Workspace, capsys: Capture
) -> None:
    kill_while_moving(run, 1, OTHER_RATE, "max_train_steps=5", FROM_3)
    capsys.readouterr()

    assert run.run("plan", OTHER_RATE, "max_train_steps=5") == 0

    assert "so the run first moves" not in capsys.readouterr().out


def train_and_die_before_pruning(*settings: str) -> None:
    prune = checkpoint_folder.prune

    def die_at_step_4(*arguments: Any, **keywords: Any) -> list[Path]:
        if find_checkpoints(Path("output"))[0][-1].step == 4:
            os._exit(9)
        return prune(*arguments, **keywords)

    checkpoint_folder.prune = die_at_step_4
    main(["train", *settings])


def test_a_branch_killed_between_saving_and_pruning_continues(run: Workspace) -> None:
    limited = ("max_train_steps=5", "checkpoints_total_limit=2")
    process = run.fork(train_and_die_before_pruning, OTHER_RATE, *limited, FROM_3)
    process.join()
    assert process.exitcode == 9

    assert run.train(OTHER_RATE, *limited) == 0

    assert checkpoints(run) == ["checkpoint-4", "checkpoint-5"]
    assert recorded_steps(run) == [1, 2, 3, 4, 5]


@THOROUGH
def test_the_advice_about_a_damaged_checkpoint_works(run: Workspace, capsys: Capture) -> None:
    state = run.path("output/checkpoint-6/training_state/state.pt")
    state.write_bytes(state.read_bytes()[:-1] + b"!")
    assert run.train("max_train_steps=7") == 2
    assert "Choose an earlier checkpoint" in capsys.readouterr().err

    assert run.train("max_train_steps=7", "resume_from_checkpoint=checkpoint-5") == 0
    assert run.train("max_train_steps=8") == 0

    assert recorded_steps(run) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert checkpoints(run, "output/branches/1") == ["checkpoint-6"]


def test_continuing_a_checkpoint_of_another_run_sets_this_run_aside(
    run: Workspace, old: Workspace, tmp_path: Path
) -> None:
    foreign = old.copy(tmp_path / "elsewhere").path("output/checkpoint-4")

    assert run.train("max_train_steps=5", f"resume_from_checkpoint={foreign}") == 0

    assert checkpoints(run) == ["checkpoint-5"]
    assert recorded_steps(run) == [5]
    assert len(checkpoints(run, "output/branches/1")) == 6
    assert foreign.is_dir()


@THOROUGH
def test_a_run_with_a_damaged_branch_record_continues_in_step_order(run: Workspace) -> None:
    run.path(f"output/{LINE_FILE}").write_text("{")

    assert run.train("max_train_steps=7") == 0

    assert recorded_steps(run) == [1, 2, 3, 4, 5, 6, 7]
