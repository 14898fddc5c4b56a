"""Checkpoints are completed while training goes on, or are absent; foreign files are refused."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simpletuner.config.schema import CheckpointConfig, EmaConfig
from simpletuner.config.types import Size
from simpletuner.distributed.world import World
from simpletuner.errors import DiskFullError, UserError
from simpletuner.planning import checkpoint_folder as manifest
from simpletuner.planning.checkpoint_folder import (
    STATE_FOLDER,
    Identity,
    Manifest,
    damaged_files,
    describe_files,
    open_checkpoint,
    write_manifest,
)
from simpletuner.reporting.events import CheckpointSaved, Event, EventStream, StepReport
from simpletuner.training import checkpoints
from simpletuner.training.checkpoints import STATE_FILE, CheckpointWriter, load_checkpoint
from simpletuner.training.drafts import Draft
from simpletuner.training.ema import Ema
from simpletuner.training.state import TrainState
from simpletuner.training.step import optimizer_step
from simpletuner.training.trained import WEIGHTS_FILE
from simpletuner.training.weight_note import WeightNote
from tests.tools.assembly import CPU, make_assembly, make_batch
from tests.tools.sharded_run import Batches

IDENTITY = Identity("kandinsky5-image", "t2i-lite-sft", "full", 1, seed=1, datasets="", versions={})
NOTE = WeightNote("kandinsky5-image/t2i-lite-sft", "a run", Size(64, 64))


class Sharers(World):
    """The world of the first of two processes, in which nothing waits for the second."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def make_writer(folder: Path, assembly: Any, seen: list[Event]) -> CheckpointWriter:
    """A writer of a full fine-tune whose weights two processes share."""
    assembly.trained.sharers = Sharers(0, 2, 0, 2)
    loader: Any = Batches(None)
    config = CheckpointConfig(checkpoint_step_interval=100)
    return CheckpointWriter(
        folder, config, loader, IDENTITY, {}, EventStream(seen.append), NOTE, in_shards=False
    )


def test_training_goes_on_while_a_checkpoint_is_completed(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = make_assembly(t2i_checkpoint, model_type="full")
    seen: list[Event] = []
    go_on = threading.Event()
    monkeypatch.setattr(
        manifest, "describe_files", lambda folder: go_on.wait(5) and describe_files(folder)
    )
    writer = make_writer(tmp_path, assembly, seen)
    before = {name: parameter.detach().clone() for name, parameter in assembly.parameters.items()}
    writer.save(assembly, TrainState(1))
    with torch.no_grad():
        for parameter in assembly.parameters.values():
            parameter.zero_()
    writer.on_step_end(assembly, TrainState(2), StepReport(2, 1, {}, 0.0))

    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1-tmp"], "complete or absent"
    assert seen == []

    go_on.set()
    writer.on_train_end(assembly, TrainState(3))
    saved = [event for event in seen if isinstance(event, CheckpointSaved)]

    assert [(event.path.name, event.step) for event in saved] == [
        ("checkpoint-1", 1),
        ("checkpoint-3-rolling", 3),
    ]

    checkpoint = open_checkpoint(saved[0].path)
    assert checkpoint is not None

    assert damaged_files(checkpoint) == []

    assembly.trained.load(checkpoint.path)
    assert all(
        torch.equal(parameter, before[name]) for name, parameter in assembly.parameters.items()
    )


@pytest.mark.parametrize("kind", ["lora", "full", "lokr"])
def test_a_checkpoint_is_written_from_a_copy_while_training_goes_on(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    settings = {"lora_type": kind} if kind == "lokr" else {"model_type": kind}
    assembly = make_assembly(t2i_checkpoint, **settings)
    seen: list[Event] = []
    go_on = threading.Event()
    assembly.trained.ema = ema = Ema(assembly.parameters, EmaConfig(use_ema=True), CPU)
    batches: Any = Batches(make_batch(t2i_checkpoint, ["a star"]))
    writer = CheckpointWriter(
        tmp_path, CheckpointConfig(), batches, IDENTITY, {}, EventStream(seen.append), NOTE
    )

    def train(step: int) -> None:
        optimizer_step(assembly, batches, step)
        ema.update(step + 1)

    train(0)
    unfinished = writer.write(tmp_path / "checkpoint-0", assembly, TrainState(1))
    write = Draft.write_into
    assert unfinished is not None
    unfinished.complete()
    monkeypatch.setattr(
        Draft, "write_into", lambda draft, folder: go_on.wait(5) and write(draft, folder)
    )
    writer.in_background = True
    writer.save(assembly, TrainState(1))
    train(1)
    files = [path for path in (tmp_path / "checkpoint-1-tmp").rglob("*") if path.is_file()]

    assert files == [], "nothing is written yet"

    go_on.set()
    writer.on_train_end(assembly, TrainState(1))

    assert [event.step for event in seen if isinstance(event, CheckpointSaved)] == [1]

    at_once = open_checkpoint(tmp_path / "checkpoint-0")
    in_background = open_checkpoint(tmp_path / "checkpoint-1")
    assert at_once is not None
    assert in_background is not None
    assert damaged_files(in_background) == []
    assert in_background.manifest.files == at_once.manifest.files, "byte for byte"


@pytest.mark.parametrize("ask", [CheckpointWriter.save, CheckpointWriter.on_train_end])
def test_a_checkpoint_that_cannot_be_completed_ends_the_run(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., None]
) -> None:
    assembly = make_assembly(t2i_checkpoint, model_type="full")
    seen: list[Event] = []

    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(manifest, "describe_files", fail)
    writer = make_writer(tmp_path, assembly, seen)
    writer.save(assembly, TrainState(1))

    with pytest.raises(DiskFullError, match="checkpoint-1: no space left"):
        ask(writer, assembly, TrainState(2))
    assert list(tmp_path.iterdir()) == []
    assert seen == []


def edit_state(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    torch.save(change(torch.load(path, weights_only=True)), path)


# Changes of a checkpoint's state folder, and the reason in the message.
EDITS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "text": (lambda folder: (folder / STATE_FILE).write_text("a state"), ""),
    "nothing": (lambda folder: (folder / STATE_FILE).write_bytes(b""), ""),
    "list": (lambda folder: edit_state(folder / STATE_FILE, list), ""),
    "key": (
        lambda folder: edit_state(folder / STATE_FILE, lambda state: state | {"optimizer": 7}),
        "",
    ),
    "absent": (lambda folder: (folder / STATE_FILE).unlink(), ""),
    "step": (
        lambda folder: edit_state(folder / STATE_FILE, lambda state: state | {"global_step": 9}),
        "step 9 of epoch 1, but its manifest has step 2 of epoch 1",
    ),
    "weights": (lambda folder: (folder / WEIGHTS_FILE).write_text("weights"), ""),
}


@pytest.fixture(scope="module")
def lora(t2i_checkpoint: Path) -> Any:
    return make_assembly(t2i_checkpoint)


@pytest.mark.parametrize("name", EDITS)
def test_a_file_edited_together_with_its_hash_is_reported_as_damaged(
    tmp_path: Path, lora: Any, name: str
) -> None:
    edit, reason = EDITS[name]
    loader: Any = Batches(None)
    folder = tmp_path / "checkpoint-2"
    writer = CheckpointWriter(
        tmp_path, CheckpointConfig(), loader, IDENTITY, {}, EventStream(print), NOTE
    )
    unfinished = writer.write(folder, lora, TrainState(2, 1))
    assert unfinished is not None
    unfinished.complete()
    edit(folder / STATE_FOLDER)
    write_manifest(folder, Manifest(2, 1, IDENTITY, describe_files(folder)))
    checkpoint = open_checkpoint(folder)
    assert checkpoint is not None

    with pytest.raises(UserError, match=f"is not a valid checkpoint .*{reason}") as caught:
        load_checkpoint(checkpoint, lora, loader, same_data=True)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_failing_device_is_not_blamed_on_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, failure: type[RuntimeError]
) -> None:
    def restore(*given: Any, **named: Any) -> None:
        raise failure("of the device")

    monkeypatch.setattr(manifest, "damaged_files", lambda checkpoint: [])
    monkeypatch.setattr(checkpoints, "_restore", restore)
    alone: Any = SimpleNamespace(world=World())

    with pytest.raises(failure, match="of the device"):
        load_checkpoint(alone, alone, alone, same_data=True)
