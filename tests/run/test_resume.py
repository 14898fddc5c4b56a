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
from safetensors.torch import load_file

from simpletuner.cli.app import main
from simpletuner.planning.checkpoint_folder import describe_files
from tests.tools.processes import PATIENCE
from tests.tools.workspace import DATASETS, Workspace

RESULT = "output/pytorch_lora_weights.safetensors"
STEPS = 6
SETTINGS: dict[str, Any] = {
    "max_train_steps": STEPS,
    "checkpoint_step_interval": 3,
    "use_ema": True,
    "lora_dropout": 0.1,
    "caption_dropout_probability": 0.3,
    "gradient_accumulation_steps": 2,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": 2,
}


def training_state(folder: Path, step: int) -> dict[str, Any]:
    """Everything a checkpoint holds that training depends on."""
    checkpoint = folder / "output" / f"checkpoint-{step}"
    state: dict[str, Any] = torch.load(
        checkpoint / "training_state" / "state.pt", weights_only=True
    )
    weights = sorted(checkpoint.rglob("*.safetensors"))
    state["files"] = {str(path.relative_to(checkpoint)): load_file(path) for path in weights}
    return state


def assert_equal(one: Any, other: Any, where: str = "state") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_equal(left, right, f"{where}[{index}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    else:
        assert one == other, where


def assert_same_run(one: Workspace, other: Workspace) -> None:
    assert one.metrics() == other.metrics()
    left, right = (training_state(each.folder, STEPS) for each in (one, other))
    for state in (left, right):
        state.pop(
            "random"
        )  # Python's own generator may be drawn from by libraries; training does not use it
    assert_equal(left, right)
    if one.path(RESULT).exists():
        assert one.path(RESULT).read_bytes() == other.path(RESULT).read_bytes()


@pytest.mark.slow(1)
@pytest.mark.parametrize(("kind", "optimizer"), [("lora", "optimi-adamw"), ("full", "adamw")])
def test_an_interrupted_run_continues_bit_exactly(
    tmp_path: Path, filled: Workspace, kind: str, optimizer: str
) -> None:
    settings = {**SETTINGS, "model_type": kind, "optimizer": optimizer, "learning_rate": 1e-4}
    straight = filled.copy(tmp_path / "straight", **settings)
    assert straight.train() == 0
    broken = straight.stopped(tmp_path / "broken", STEPS // 2)
    assert broken.train("resume_from_checkpoint=latest") == 0
    assert_same_run(straight, broken)


def test_a_full_fine_tune_can_continue_with_released_gradients(
    tmp_path: Path, filled: Workspace
) -> None:
    """And with its state on the host: the same files as of the run that keeps all gradients."""
    settings = {**SETTINGS, "model_type": "full", "gradient_accumulation_steps": 1}
    straight = filled.copy(tmp_path / "straight", **settings)
    assert straight.train() == 0
    broken = Workspace(shutil.copytree(straight.folder, tmp_path / "broken"))
    shutil.rmtree(broken.path(f"output/checkpoint-{STEPS}"))
    assert broken.train("optimizer_release_gradients=true", "offload_optimizer_state=true") == 0
    assert_same_run(straight, broken)


@pytest.mark.slow
def test_resuming_from_an_earlier_checkpoint_is_bit_exact(
    tmp_path: Path, straight: Workspace
) -> None:
    resumed = Workspace(shutil.copytree(straight.folder, tmp_path / "resumed"))
    resumed.path(RESULT).unlink()
    assert resumed.train("resume_from_checkpoint=checkpoint-3") == 0
    assert_same_run(straight, resumed)


@pytest.mark.slow(5)
def test_kill_at_any_moment_resumes_bit_exactly(
    tmp_path: Path, t2i_checkpoint: Path, straight: Workspace
) -> None:
    killed = Workspace.create(
        tmp_path / "killed", t2i_checkpoint, **SETTINGS, checkpoints_total_limit=0
    )
    killed.write_config(checkpoint_step_interval=1)
    straight_again = random.Random(0)
    for _ in range(3):
        process = killed.fork(main, ["train"])
        seen = killed.path("output")
        deadline = time.monotonic() + PATIENCE
        while process.is_alive() and not seen.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(straight_again.uniform(0.0, 2.0))
        process.kill()
        process.join()
    assert killed.train("--checkpoint_step_interval=3") == 0
    assert_same_run(straight, killed)


def test_a_finished_run_is_not_trained_again(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trained.path("output/pytorch_lora_weights.safetensors").read_bytes()
    record = trained.metrics()
    assert trained.train() == 0
    assert "finished" in capsys.readouterr().out
    assert trained.metrics() == record
    assert trained.path("output/pytorch_lora_weights.safetensors").read_bytes() == before


def test_more_steps_continue_a_finished_run(trained: Workspace) -> None:
    assert trained.train("max_train_steps=6") == 0
    assert [line["step"] for line in trained.metrics()] == [1, 2, 3, 4, 5, 6]


def test_rolling_checkpoints_have_a_separate_limit(workspace: Workspace) -> None:
    limits = (
        "checkpoints_total_limit=1",
        "checkpointing_rolling_steps=1",
        "checkpoints_rolling_total_limit=2",
    )
    assert workspace.train("max_train_steps=5", "checkpoint_step_interval=2", *limits) == 0
    names = {path.name for path in workspace.path("output").glob("checkpoint-*")}
    assert names == {"checkpoint-3-rolling", "checkpoint-4", "checkpoint-5-rolling"}


def test_incomplete_checkpoints_are_skipped_and_damaged_ones_refused(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.path("output/checkpoint-4/manifest.json").unlink()
    trained.path("output/pytorch_lora_weights.safetensors").unlink()
    assert trained.train() == 0, "the incomplete one is skipped"
    assert "checkpoint-4 is not complete" in capsys.readouterr().out
    state = trained.path("output/checkpoint-4/training_state/state.pt")
    state.write_bytes(state.read_bytes()[:-1] + b"!")
    trained.path("output/pytorch_lora_weights.safetensors").unlink()
    assert trained.train() == 2
    assert "damaged" in capsys.readouterr().err


def test_a_training_state_of_wrong_types_is_refused_without_a_traceback(
    trained: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained.path("output/checkpoint-4")
    state = folder / "training_state/state.pt"
    manifest = json.loads((folder / "manifest.json").read_text())
    torch.save({**torch.load(state, weights_only=True), "random": "x"}, state)
    files = {name: list(file) for name, file in describe_files(folder).items()}
    (folder / "manifest.json").write_text(json.dumps({**manifest, "files": files}))
    assert trained.train("max_train_steps=5") == 2
    told = capsys.readouterr().err
    assert "checkpoint-4 is not a valid checkpoint" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "full", "learning_rate": 1e-4}, "model_type lora"),
        ({"train_batch_size": 1}, "train_batch_size 2"),
        ({"lora_rank": 4}, "lora_rank"),
    ],
)
def test_a_different_run_in_the_same_folder_is_refused(
    trained: Workspace, capsys: pytest.CaptureFixture[str], change: dict[str, Any], words: str
) -> None:
    trained.write_config(**change, max_train_steps=6)
    assert trained.train() == 2
    assert words in capsys.readouterr().err


def test_training_does_not_change_the_datasets_file(trained: Workspace) -> None:
    assert trained.path("config/multidatabackend.json").read_text().startswith("[{")
    assert len(DATASETS) == 2
