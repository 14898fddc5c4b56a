"""n steps, a stop and m more steps equal n + m steps bit for bit, however the run was stopped."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.cli.app import main
from simpletuner.planning.checkpoint_folder import describe_files
from tests.tools.processes import PATIENCE
from tests.tools.runs import LORA, STATEFUL_RUN, STEPS, assert_same_run
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]


@pytest.mark.slow(1)
@pytest.mark.parametrize(("kind", "optimizer"), [("lora", "optimi-adamw"), ("full", "adamw")])
def test_an_interrupted_run_continues_bit_exactly(
    tmp_path: Path, filled: Workspace, kind: str, optimizer: str
) -> None:
    settings = {**STATEFUL_RUN, "model_type": kind, "optimizer": optimizer, "learning_rate": 1e-4}
    straight = filled.copy(tmp_path / "straight", **settings)
    assert straight.train() == 0
    stopped = straight.stopped(tmp_path / "stopped", STEPS // 2)

    assert stopped.train("resume_from_checkpoint=latest") == 0

    assert_same_run(straight, stopped)


def test_a_full_fine_tune_can_continue_with_released_gradients(
    tmp_path: Path, filled: Workspace
) -> None:
    """Released gradients and a state on the host give the files of the run that keeps both."""
    settings = {**STATEFUL_RUN, "model_type": "full", "gradient_accumulation_steps": 1}
    straight = filled.copy(tmp_path / "straight", **settings)
    assert straight.train() == 0
    # Only the last checkpoint is missing: the pipeline of the straight run stays.
    stopped = straight.copy(tmp_path / "stopped")
    shutil.rmtree(stopped.path(f"output/checkpoint-{STEPS}"))

    assert stopped.train("optimizer_release_gradients=true", "offload_optimizer_state=true") == 0

    assert_same_run(straight, stopped)


@pytest.mark.slow
def test_resuming_from_an_earlier_checkpoint_is_bit_exact(
    tmp_path: Path, straight: Workspace
) -> None:
    resumed = straight.copy(tmp_path / "resumed")
    resumed.path(LORA).unlink()

    assert resumed.train("resume_from_checkpoint=checkpoint-3") == 0

    assert_same_run(straight, resumed)


@pytest.mark.slow(5)
def test_kill_at_any_moment_resumes_bit_exactly(
    tmp_path: Path, t2i_checkpoint: Path, straight: Workspace
) -> None:
    killed = Workspace.create(
        tmp_path / "killed", t2i_checkpoint, **STATEFUL_RUN, checkpoints_total_limit=0
    )
    killed.write_config(checkpoint_step_interval=1)
    moments = random.Random(0)

    for _ in range(3):
        kill_after_start(killed, moments.uniform(0.0, 2.0))
    assert killed.train("--checkpoint_step_interval=3") == 0

    assert_same_run(straight, killed)


def kill_after_start(run: Workspace, seconds: float) -> None:
    """Train in another process and kill it some seconds after its output folder exists."""
    process = run.fork(main, ["train"])
    output = run.path("output")
    deadline = time.monotonic() + PATIENCE
    while process.is_alive() and not output.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    process.kill()
    process.join()


def test_a_finished_run_is_not_trained_again(trained: Workspace, capsys: Capture) -> None:
    result = trained.path(LORA).read_bytes()
    record = trained.metrics()

    assert trained.train() == 0

    assert "finished" in capsys.readouterr().out
    assert trained.metrics() == record
    assert trained.path(LORA).read_bytes() == result


def test_more_steps_continue_a_finished_run(trained: Workspace) -> None:
    assert trained.train("max_train_steps=6") == 0

    assert [row["step"] for row in trained.metrics()] == [1, 2, 3, 4, 5, 6]


def test_rolling_checkpoints_have_a_separate_limit(workspace: Workspace) -> None:
    settings = {
        "max_train_steps": 5,
        "checkpoint_step_interval": 2,
        "checkpoints_total_limit": 1,
        "checkpointing_rolling_steps": 1,
        "checkpoints_rolling_total_limit": 2,
    }
    workspace.write_config(**settings)

    assert workspace.train() == 0

    names = {path.name for path in workspace.path("output").glob("checkpoint-*")}
    assert names == {"checkpoint-3-rolling", "checkpoint-4", "checkpoint-5-rolling"}


def test_an_incomplete_checkpoint_is_skipped(trained: Workspace, capsys: Capture) -> None:
    trained.path("output/checkpoint-4/manifest.json").unlink()
    trained.path(LORA).unlink()

    assert trained.train() == 0

    assert "checkpoint-4 is not complete" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_refused(trained: Workspace, capsys: Capture) -> None:
    state = trained.path("output/checkpoint-4/training_state/state.pt")
    state.write_bytes(state.read_bytes()[:-1] + b"!")
    trained.path(LORA).unlink()

    assert trained.train() == 2

    assert "damaged" in capsys.readouterr().err


def test_a_training_state_of_wrong_types_is_refused_without_a_traceback(
    trained: Workspace, capsys: Capture
) -> None:
    checkpoint = trained.path("output/checkpoint-4")
    state = checkpoint / "training_state/state.pt"
    torch.save({**torch.load(state, weights_only=True), "random": "x"}, state)
    # The manifest has the hash of the changed file, so only reading the state can fail.
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {name: list(file) for name, file in describe_files(checkpoint).items()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    assert trained.train("max_train_steps=5") == 2

    error = capsys.readouterr().err
    assert "checkpoint-4 is not a valid checkpoint" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "full", "learning_rate": 1e-4}, "model_type lora"),
        ({"train_batch_size": 1}, "train_batch_size 2"),
        ({"lora_rank": 4}, "lora_rank"),
    ],
)
def test_a_different_run_in_the_same_folder_is_refused(
    trained: Workspace, capsys: Capture, change: dict[str, Any], words: str
) -> None:
    trained.write_config(**change, max_train_steps=6)

    assert trained.train() == 2

    assert words in capsys.readouterr().err


def test_training_does_not_change_the_datasets_file(workspace: Workspace) -> None:
    datasets = workspace.path("config/multidatabackend.json")
    before = datasets.read_bytes()

    assert workspace.train("max_train_steps=1") == 0

    assert datasets.read_bytes() == before
