"""Previews that are decoded while training goes on are the same, are all there at the end, and
never cost the run.
"""

from __future__ import annotations

import errno
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL.Image import Image

from simpletuner.atomic import writing_to
from simpletuner.errors import DiskFullError
from simpletuner.models.adapter import PreviewRequest, TextRequest
from simpletuner.models.kandinsky5.image import StockPipeline
from simpletuner.reporting.metrics import MediaRecord
from simpletuner.training.checkpoints import CheckpointWriter, UnfinishedCheckpoint
from simpletuner.validation.background import DecodingThread
from tests.tools.families import CPU, make_adapter, make_video_adapter, picture
from tests.tools.processes import PATIENCE
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import Workspace

RECORD = MediaRecord(1, "a", "a star", "a.png", 8, 8, 0, False, 0)


@pytest.mark.slow(1)
@pytest.mark.parametrize("task", ["t2i", "i2i", "t2v", "i2v"])
@torch.no_grad()
def test_background_decoding_gives_the_same_bytes(
    tmp_path: Path, i2i_checkpoint: Path, task: str
) -> None:
    checkpoint = i2i_checkpoint if task == "i2i" else make_checkpoint(tmp_path, task)
    adapter: Any = (make_adapter if task.endswith("i") else make_video_adapter)(checkpoint, task)
    source = picture(96, 64) if task in ("i2i", "i2v") else None
    text = TextRequest("a red ball", source if task == "i2i" else None)
    (embeds,) = adapter.load_text_encoder(CPU, torch.float32).encode([text])
    stock = adapter.load_preview_pipeline(adapter.load_transformer(torch.float32).eval(), CPU, None)
    request = PreviewRequest(
        embeds, embeds, 96, 64, 2, 1.0, 5, source=source, num_frames=1 if task[-1] == "i" else 17
    )
    now = stock.render(request)
    decode = stock.sample(request)
    with ThreadPoolExecutor(1) as thread:
        later = thread.submit(torch.no_grad()(decode)).result()

    assert len(now) == len(later)
    for one, other in zip(now, later, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow(1)
def test_background_decoding_changes_neither_previews_nor_weights(
    tmp_path: Path, filled: Workspace
) -> None:
    """Also if training is much faster than the decoder."""
    runs = [filled.copy(tmp_path / name) for name in ("now", "later")]
    settings = {"validation_disable": False, "validation_step_interval": 1, "max_train_steps": 3}
    for run, background in zip(runs, (False, True), strict=True):
        run.write_config(**settings, validation_decode_in_background=background)
        assert run.train() == 0
    now, later = (
        {
            str(path.relative_to(run.folder)): path.read_bytes()
            for path in run.path("output").rglob("*validation*.png")
        }
        for run in runs
    )
    assert len(now) == 4
    assert now == later
    one, other = (run.path("output/pytorch_lora_weights.safetensors").read_bytes() for run in runs)
    assert one == other
    records = [run.path("output/validation_media.jsonl").read_text() for run in runs]

    assert records[0] == records[1]


def test_training_continues_while_previews_decode_and_checkpoints_wait(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that continues from a checkpoint has the previews of all steps before it."""
    decode = StockPipeline._decode
    write = CheckpointWriter.write
    steps: list[int] = []
    saved: list[bool] = []
    first = workspace.path("output/validation_images/step_1_validation_0_128x128.png")

    def slowly(self: StockPipeline, latents: torch.Tensor) -> list[Image]:
        deadline = time.monotonic() + PATIENCE
        while len(workspace.metrics()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        steps.append(len(workspace.metrics()))
        return decode(self, latents)

    def look(*inputs: Any) -> UnfinishedCheckpoint | None:
        saved.append(first.exists())
        return write(*inputs)

    monkeypatch.setattr(StockPipeline, "_decode", slowly)
    monkeypatch.setattr(CheckpointWriter, "write", look)
    workspace.write_config(
        validation_disable=False,
        validation_step_interval=1,
        checkpoint_step_interval=2,
        max_train_steps=2,
        validation_decode_in_background=True,
        disable_benchmark=True,
    )

    assert workspace.train() == 0
    assert steps == [2, 2], "the second step came before the first preview"
    assert saved == [True]
    assert first.with_name("step_2_validation_0_128x128.png").exists()


def test_a_failed_decoder_costs_one_preview_and_not_the_run(
    workspace: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = StockPipeline._decode
    failures = iter([torch.OutOfMemoryError("CUDA out of memory")])

    def fail_once(self: StockPipeline, latents: torch.Tensor) -> list[Image]:
        for failure in failures:
            raise failure
        return decode(self, latents)

    monkeypatch.setattr(StockPipeline, "_decode", fail_once)
    workspace.write_config(
        validation_disable=False,
        validation_step_interval=2,
        validation_decode_in_background=True,
        disable_benchmark=True,
    )
    assert workspace.train() == 0
    shown = capsys.readouterr()
    lost = "The preview validation of step 2 is lost: OutOfMemoryError: CUDA out of memory"
    assert lost in shown.out + shown.err
    (name,) = (path.name for path in workspace.path("output/validation_images").iterdir())

    assert name == "step_4_validation_0_128x128.png"


def test_a_full_disk_in_the_decoding_thread_stops_the_run(tmp_path: Path) -> None:
    def write(frames: list[Image]) -> MediaRecord:
        with writing_to(tmp_path / "a.png"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with ThreadPoolExecutor(1) as thread:
        decoding = DecodingThread(thread, CPU)
        decoding.submit("a", list, lambda frames: RECORD)
        decoding.submit("b", list, write)
        finished = decoding.finished(wait=True)
        assert next(finished) == RECORD
        with pytest.raises(DiskFullError, match=r"a\.png: no space left"):
            next(finished)
        assert decoding.is_idle
