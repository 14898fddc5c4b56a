"""A run that continues from an earlier checkpoint is one line from then on; what it leaves is set
aside, not lost.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.sampling import SampleRequest, plan_samples
from simpletuner.cli.app import main
from simpletuner.config.sources import parse_arguments
from simpletuner.headers import METADATA, read_header
from simpletuner.planning import checkpoint_folder as manifest
from simpletuner.planning import lineage
from simpletuner.planning.checkpoint_folder import LINE_FILE, find_checkpoints
from simpletuner.planning.lock import this_process
from simpletuner.weights.published_lora import OFFICIAL_SETTINGS
from tests.conftest import make_room
from tests.tools.runs import assert_equal, training_state
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow(3)

THOROUGH = pytest.mark.thorough
LORA = "output/pytorch_lora_weights.safetensors"
OLD: dict[str, Any] = {
    "max_train_steps": 6,
    "checkpoint_step_interval": 1,
    "checkpoints_total_limit": 0,
}
# What makes a branch another line than the one that it leaves.
OTHER = "learning_rate=5e-3"


def checkpoints(folder: Path) -> list[str]:
    """The checkpoints in a folder, by their steps."""
    names = [path.name for path in folder.glob("checkpoint-*")]
    return sorted(names, key=lambda name: int(name.split("-")[1]))


def steps(run: Workspace, output: str = "output") -> list[int]:
    return [row["step"] for row in run.metrics(output)]


def result_step(file: Path) -> str:
    return str(read_header(file)[METADATA]["simpletuner.step"])


def assert_same(run: Workspace, other: Workspace, step: int) -> None:
    """Two runs have the same checkpoints, record and result, bit for bit."""
    assert checkpoints(run.path("output")) == checkpoints(other.path("output"))
    assert run.metrics() == other.metrics()
    assert_equal(training_state(run, step), training_state(other, step))
    assert run.path(LORA).read_bytes() == other.path(LORA).read_bytes()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory, encoded: Workspace) -> Workspace:
    """A finished run with a checkpoint of each of its six steps."""
    run = encoded.copy(tmp_path_factory.mktemp("old") / "run", **OLD)
    with pytest.MonkeyPatch.context() as patch:
        make_room(patch)
        assert run.train() == 0
    return run


@pytest.fixture
def run(tmp_path: Path, old: Workspace) -> Workspace:
    return old.copy(tmp_path / "run")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, old: Workspace) -> Workspace:
    """What a branch at step 3 must equal: the same history, by a run that had never gone further
    than step 3.
    """
    run = old.stopped(tmp_path_factory.mktemp("straight") / "run", 3)
    with pytest.MonkeyPatch.context() as patch:
        make_room(patch)
        assert run.train(OTHER, "max_train_steps=5") == 0
        assert run.train(OTHER, "max_train_steps=7") == 0
    return run


def test_a_branch_equals_a_run_that_never_trained_the_later_steps(
    run: Workspace, straight: Workspace
) -> None:
    assert run.train(OTHER, "max_train_steps=5", "resume_from_checkpoint=checkpoint-3") == 0
    assert run.train(OTHER, "max_train_steps=7") == 0
    assert_same(run, straight, 7)
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7]


def test_plan_and_status_show_the_step_an_interrupted_run_continues_from(
    run: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted = run.stopped(run.folder.parent / "interrupted", 4)
    capsys.readouterr()
    assert interrupted.run("plan", "max_train_steps=8") == 0
    assert (
        "continues from step 4; 2 steps are trained again (checkpoint-4)" in capsys.readouterr().out
    )
    interrupted.path("output/events.jsonl").unlink()
    owner = replace(this_process(), pid=2**22 + 1)
    interrupted.path("output/run.lock").write_text(json.dumps(asdict(owner)))
    status = Run("run", interrupted.path("output"), written_by="config").status()
    assert (
        status["message"]
        == "Ended unexpectedly at step 6. It continues from step 4; 2 steps are trained again."
    )


def test_later_checkpoints_move_to_a_branch_folder_and_are_listed(
    run: Workspace, old: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.train("max_train_steps=4", "resume_from_checkpoint=checkpoint-3") == 0
    said = capsys.readouterr().out
    assert (
        "moves to branches/1: checkpoint-4, checkpoint-5, checkpoint-6, the result of step 6"
        in said
    )
    assert "Without resume_from_checkpoint, it continues from checkpoint-6 instead." in said
    assert "set resume_from_checkpoint=branches/1/checkpoint-6" in said
    aside = run.path("output/branches/1")
    assert checkpoints(aside) == ["checkpoint-4", "checkpoint-5", "checkpoint-6"]
    assert (aside / Path(LORA).name).read_bytes() == old.path(LORA).read_bytes()
    assert (aside / OFFICIAL_SETTINGS).is_file(), "Kandinsky's program reads it beside the LoRA"
    assert run.metrics("output/branches/1") == old.metrics()


def test_a_finished_branch_stays_the_result(
    run: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.train("max_train_steps=4", "resume_from_checkpoint=checkpoint-3") == 0
    before = run.path(LORA).read_bytes()
    capsys.readouterr()
    assert run.train("max_train_steps=4") == 0
    assert "This run is finished: 4 steps are done" in capsys.readouterr().out
    assert run.path(LORA).read_bytes() == before
    assert result_step(run.path(LORA)) == "4"


def test_a_branch_can_branch_again(run: Workspace) -> None:
    assert run.train(OTHER, "max_train_steps=6", "resume_from_checkpoint=checkpoint-2") == 0
    assert run.train("max_train_steps=5", "resume_from_checkpoint=checkpoint-4") == 0
    assert run.train("max_train_steps=6") == 0
    newest = find_checkpoints(run.path("output"))[0][-1].manifest
    assert [(fork.step, fork.number) for fork in newest.forks] == [(2, 1), (4, 2)]
    assert steps(run) == [1, 2, 3, 4, 5, 6]
    assert checkpoints(run.path("output/branches/1")) == [
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-5",
        "checkpoint-6",
    ]
    assert checkpoints(run.path("output/branches/2")) == ["checkpoint-5", "checkpoint-6"]


def test_a_run_can_return_to_a_branch_that_was_set_aside(
    run: Workspace, old: Workspace, tmp_path: Path
) -> None:
    assert run.train(OTHER, "max_train_steps=5", "resume_from_checkpoint=checkpoint-3") == 0
    assert run.train("max_train_steps=7", "resume_from_checkpoint=branches/1/checkpoint-6") == 0
    longer = old.copy(tmp_path / "longer")
    assert longer.train("max_train_steps=7") == 0
    assert_same(run, longer, 7)
    assert checkpoints(run.path("output/branches/2")) == ["checkpoint-4", "checkpoint-5"]
    assert result_step(run.path("output/branches/2") / Path(LORA).name) == "5"


def test_pruning_counts_only_checkpoints_of_the_current_branch(run: Workspace) -> None:
    branch = (
        "max_train_steps=5",
        "checkpoints_total_limit=2",
        "resume_from_checkpoint=checkpoint-3",
    )
    assert run.train(*branch) == 0
    assert checkpoints(run.path("output")) == ["checkpoint-4", "checkpoint-5"]
    assert checkpoints(run.path("output/branches/1")) == [
        "checkpoint-4",
        "checkpoint-5",
        "checkpoint-6",
    ]


@THOROUGH
def test_checkpoints_without_branch_records_continue_in_step_order(run: Workspace) -> None:
    for path in run.path("output").glob("checkpoint-*/manifest.json"):
        content = json.loads(path.read_text())
        del content["forks"]
        path.write_text(json.dumps(content))
    assert run.train("max_train_steps=7") == 0
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7]
    assert run.train("max_train_steps=5", "resume_from_checkpoint=checkpoint-3") == 0
    assert checkpoints(run.path("output")) == [f"checkpoint-{step}" for step in (1, 2, 3, 4, 5)]


def test_sweep_and_sample_use_the_checkpoints_of_the_current_branch(run: Workspace) -> None:
    assert run.train("max_train_steps=4", "resume_from_checkpoint=checkpoint-2") == 0
    with run.inside():
        request = SampleRequest("output", "sweep", parse_arguments([]), ["a star"], sweeps=True)
        _, weights = plan_samples(request)
        latest = SampleRequest(
            "output", "samples", parse_arguments([]), ["a star"], checkpoints=["latest"]
        )
        _, sampled = plan_samples(latest)
    assert [weight.step for weight in weights] == [1, 2, 3, 4]
    assert [each.step for each in sampled] == [4]


def test_previews_and_the_wandb_run_move_with_their_branch(run: Workspace) -> None:
    previews = {
        "validation_disable": "false",
        "validation_step_interval": "2",
        "disable_benchmark": "true",
        "validation_disable_unconditional": "true",
    }
    settings = [f"{key}={value}" for key, value in previews.items()]
    shutil.rmtree(run.path("output"))
    assert run.train("max_train_steps=4", *settings) == 0
    run.path("output/wandb_run.json").write_text('{"id": "old"}')
    picture = "validation_images/step_4_validation_0_128x128.png"
    before = run.path(f"output/{picture}").read_bytes()
    assert (
        run.train("max_train_steps=4", OTHER, "resume_from_checkpoint=checkpoint-2", *settings) == 0
    )
    assert run.path(f"output/branches/1/{picture}").read_bytes() == before
    assert run.path(f"output/{picture}").read_bytes() != before
    assert json.loads(run.path("output/branches/1/wandb_run.json").read_text()) == {"id": "old"}
    assert not run.path("output/wandb_run.json").exists(), "the branch is another run"
    rows = run.path("output/validation_media.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [2, 4]


def train_and_die(moves: int, *settings: str) -> None:
    """Train, and end without any farewell after so many files were moved."""
    move = lineage._move
    moved: list[Path] = []

    def watched(path: Path, target: Path) -> None:
        if path.exists():
            if len(moved) == moves:
                os._exit(9)
            moved.append(path)
        move(path, target)

    lineage._move = watched
    main(["train", *settings])


@pytest.mark.parametrize(
    "moves", [pytest.param(0, marks=THOROUGH), 1, pytest.param(3, marks=THOROUGH)]
)
def test_a_kill_while_files_move_does_not_change_the_branch(
    run: Workspace, straight: Workspace, moves: int
) -> None:
    process = run.fork(
        train_and_die, moves, OTHER, "max_train_steps=5", "resume_from_checkpoint=checkpoint-3"
    )
    process.join()
    assert process.exitcode == 9
    assert run.train(OTHER, "max_train_steps=5") == 0
    assert run.train(OTHER, "max_train_steps=7") == 0
    assert_same(run, straight, 7)
    assert checkpoints(run.path("output/branches/1")) == [
        "checkpoint-4",
        "checkpoint-5",
        "checkpoint-6",
    ]


@THOROUGH
@pytest.mark.parametrize("moves", [1, 3, 5])
def test_a_kill_while_returning_to_a_branch_does_not_change_the_result(
    run: Workspace, old: Workspace, tmp_path: Path, moves: int
) -> None:
    assert run.train(OTHER, "max_train_steps=5", "resume_from_checkpoint=checkpoint-3") == 0
    back = ("max_train_steps=7", "resume_from_checkpoint=branches/1/checkpoint-6")
    process = run.fork(train_and_die, moves, *back)
    process.join()
    assert process.exitcode == 9
    assert run.train("max_train_steps=7") == 0
    longer = old.copy(tmp_path / "longer")
    assert longer.train("max_train_steps=7") == 0
    assert_same(run, longer, 7)
    assert {path.name for path in run.path("output/branches").iterdir()} == {"1", "2"}, (
        "no further branch"
    )


def test_a_branch_that_was_killed_at_its_start_is_not_announced_twice(
    run: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    process = run.fork(
        train_and_die, 1, OTHER, "max_train_steps=5", "resume_from_checkpoint=checkpoint-3"
    )
    process.join()
    capsys.readouterr()

    assert run.run("plan", OTHER, "max_train_steps=5") == 0
    assert "so the run first moves" not in capsys.readouterr().out


def train_and_die_before_pruning(*settings: str) -> None:
    prune = manifest.prune

    def die(*arguments: Any, **named: Any) -> list[Path]:
        if find_checkpoints(Path("output"))[0][-1].step == 4:
            os._exit(9)
        return prune(*arguments, **named)

    manifest.prune = die
    main(["train", *settings])


def test_a_branch_killed_between_saving_and_pruning_continues(run: Workspace) -> None:
    limited = ("max_train_steps=5", "checkpoints_total_limit=2")
    process = run.fork(
        train_and_die_before_pruning, OTHER, *limited, "resume_from_checkpoint=checkpoint-3"
    )
    process.join()
    assert process.exitcode == 9
    assert run.train(OTHER, *limited) == 0
    assert checkpoints(run.path("output")) == ["checkpoint-4", "checkpoint-5"]
    assert steps(run) == [1, 2, 3, 4, 5]


@THOROUGH
def test_the_advice_about_a_damaged_checkpoint_works(
    run: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    state = run.path("output/checkpoint-6/training_state/state.pt")
    state.write_bytes(state.read_bytes()[:-1] + b"!")
    assert run.train("max_train_steps=7") == 2
    assert "Choose an earlier checkpoint" in capsys.readouterr().err
    assert run.train("max_train_steps=7", "resume_from_checkpoint=checkpoint-5") == 0
    assert run.train("max_train_steps=8") == 0
    assert steps(run) == list(range(1, 9))
    assert checkpoints(run.path("output/branches/1")) == ["checkpoint-6"]


def test_continuing_a_checkpoint_of_another_run_sets_this_run_aside(
    run: Workspace, old: Workspace, tmp_path: Path
) -> None:
    elsewhere = old.copy(tmp_path / "elsewhere").path("output/checkpoint-4")
    assert run.train("max_train_steps=5", f"resume_from_checkpoint={elsewhere}") == 0
    assert checkpoints(run.path("output")) == ["checkpoint-5"]
    assert steps(run) == [5]
    assert len(checkpoints(run.path("output/branches/1"))) == 6
    assert elsewhere.is_dir()


@THOROUGH
def test_a_run_with_a_damaged_branch_record_continues_in_step_order(run: Workspace) -> None:
    run.path(f"output/{LINE_FILE}").write_text("{")
    assert run.train("max_train_steps=7") == 0
    assert steps(run) == [1, 2, 3, 4, 5, 6, 7]
