"""Checkpoints of shared weights are completed while training goes on, or are not there at all."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.config.schema import CheckpointConfig, EmaConfig
from simpletuner.distributed.world import World
from simpletuner.errors import DiskFullError
from simpletuner.reporting.events import CheckpointSaved, Event, EventStream, StepReport
from simpletuner.training import manifest
from simpletuner.training.checkpoints import CheckpointWriter
from simpletuner.training.ema import Ema
from simpletuner.training.manifest import (
    Identity,
    damaged_files,
    describe_files,
    open_checkpoint,
)
from simpletuner.training.state import TrainState
from simpletuner.training.step import optimizer_step
from simpletuner.training.trained import Draft
from tests.distributed.sharded_run import Batches
from tests.training.assembly import CPU, make_assembly, make_batch

IDENTITY = Identity("kandinsky5-image", "t2i-lite-sft", "full", 1, seed=1, datasets="", versions={})


class Sharers(World):
    """The first of two processes, of which the other one is always done already."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def make_writer(folder: Path, assembly: Any, seen: list[Event]) -> CheckpointWriter:
    """Of a full fine-tune whose weights two processes share."""
    assembly.trained.sharers = Sharers(0, 2, 0, 2)
    loader: Any = Batches(None)
    config = CheckpointConfig(checkpoint_step_interval=100)
    return CheckpointWriter(
        folder, config, loader, IDENTITY, {}, EventStream(seen.append), lambda state: {}, in_shards=False
    )


def test_training_goes_on_while_a_checkpoint_is_completed(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly, seen, go_on = make_assembly(t2i_checkpoint, model_type="full"), list[Event](), threading.Event()
    monkeypatch.setattr(manifest, "describe_files", lambda folder: go_on.wait(5) and describe_files(folder))
    writer = make_writer(tmp_path, assembly, seen)
    before = {name: each.detach().clone() for name, each in assembly.parameters.items()}
    writer.save(assembly, TrainState(1))
    with torch.no_grad():
        for each in assembly.parameters.values():
            each.zero_()
    writer.on_step_end(assembly, TrainState(2), StepReport(2, 1, {}, 0.0))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1-tmp"], "complete or absent"
    assert seen == []

    go_on.set()
    writer.on_train_end(assembly, TrainState(3))
    saved = [each for each in seen if isinstance(each, CheckpointSaved)]
    assert [(each.path.name, each.step) for each in saved] == [("checkpoint-1", 1), ("checkpoint-3-rolling", 3)]
    checkpoint = open_checkpoint(saved[0].path)
    assert checkpoint is not None
    assert damaged_files(checkpoint) == []
    assembly.trained.load(checkpoint.path)
    assert all(torch.equal(each, before[name]) for name, each in assembly.parameters.items())


@pytest.mark.parametrize("kind", ["lora", "full", "lokr"])
def test_a_checkpoint_is_written_from_a_copy_while_training_goes_on(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    settings = {"lora_type": kind} if kind == "lokr" else {"model_type": kind}
    assembly, seen, go_on = make_assembly(t2i_checkpoint, **settings), list[Event](), threading.Event()
    assembly.trained.ema = ema = Ema(assembly.parameters, EmaConfig(use_ema=True), CPU)
    batches: Any = Batches(make_batch(t2i_checkpoint, ["a star"]))
    writer = CheckpointWriter(
        tmp_path, CheckpointConfig(), batches, IDENTITY, {}, EventStream(seen.append), lambda state: {}
    )

    def train(step: int) -> None:
        optimizer_step(assembly, batches, step)
        ema.update(step + 1)

    train(0)
    complete, write = writer.write(tmp_path / "checkpoint-0", assembly, TrainState(1)), Draft.write_into
    assert complete is not None
    complete()
    monkeypatch.setattr(Draft, "write_into", lambda draft, folder: go_on.wait(5) and write(draft, folder))
    writer.in_background = True
    writer.save(assembly, TrainState(1))
    train(1)
    files = [path for path in (tmp_path / "checkpoint-1-tmp").rglob("*") if path.is_file()]
    assert files == [], "nothing is written yet"
    go_on.set()
    writer.on_train_end(assembly, TrainState(1))
    assert [each.step for each in seen if isinstance(each, CheckpointSaved)] == [1]
    one, other = (open_checkpoint(tmp_path / f"checkpoint-{number}") for number in (0, 1))
    assert one is not None
    assert other is not None
    assert damaged_files(other) == []
    assert one.manifest.files == other.manifest.files, "byte for byte what would have been written at once"


@pytest.mark.parametrize("ask", [CheckpointWriter.save, CheckpointWriter.on_train_end])
def test_a_checkpoint_that_cannot_be_completed_ends_the_run(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., None]
) -> None:
    assembly, seen = make_assembly(t2i_checkpoint, model_type="full"), list[Event]()

    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(manifest, "describe_files", fail)
    writer = make_writer(tmp_path, assembly, seen)
    writer.save(assembly, TrainState(1))
    with pytest.raises(DiskFullError, match="checkpoint-1: no space left"):
        ask(writer, assembly, TrainState(2))
    assert list(tmp_path.iterdir()) == []
    assert seen == []
