"""Previews decoded in the background are the same, are complete at the end, and stop no run."""

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
    is_clip = task in ("t2v", "i2v")
    make = make_video_adapter if is_clip else make_adapter
    adapter: Any = make(checkpoint, task)
    source = picture(96, 64) if task in ("i2i", "i2v") else None
    text = TextRequest("a red ball", source if task == "i2i" else None)
    (embeds,) = adapter.load_text_encoder(CPU, torch.float32).encode([text])
    stock = adapter.load_preview_pipeline(adapter.load_transformer(torch.float32).eval(), CPU, None)
    frames = 17 if is_clip else 1
    request = PreviewRequest(embeds, embeds, 96, 64, 2, 1.0, 5, source=source, num_frames=frames)
    expected = stock.render(request)

    decode = stock.sample(request)
    with ThreadPoolExecutor(1) as thread:
        decoded = thread.submit(torch.no_grad()(decode)).result()

    for frame, expected_frame in zip(decoded, expected, strict=True):
        assert np.array_equal(np.asarray(frame), np.asarray(expected_frame))


@pytest.mark.slow(1)
def test_background_decoding_changes_neither_previews_nor_weights(
    tmp_path: Path, filled: Workspace
) -> None:
    """Also if training is much faster than the decoder."""
    settings = {"validation_disable": False, "validation_step_interval": 1, "max_train_steps": 3}
    plain = filled.copy(tmp_path / "plain")
    plain.write_config(**settings, validation_decode_in_background=False)
    background = filled.copy(tmp_path / "background")
    background.write_config(**settings, validation_decode_in_background=True)

    assert plain.train() == 0
    assert background.train() == 0

    assert len(previews(plain)) == 4
    assert previews(background) == previews(plain)
    for name in ("pytorch_lora_weights.safetensors", "validation_media.jsonl"):
        path = f"output/{name}"
        assert background.path(path).read_bytes() == plain.path(path).read_bytes()


def previews(run: Workspace) -> dict[str, bytes]:
    """The pictures of a run by path in its folder."""
    paths = run.path("output").rglob("*validation*.png")
    return {str(path.relative_to(run.folder)): path.read_bytes() for path in paths}


def test_training_continues_while_previews_decode_and_checkpoints_wait(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a run that continues from a checkpoint has the previews of all steps before it."""
    decode = StockPipeline._decode
    write = CheckpointWriter.write
    steps_when_decoded: list[int] = []
    exists_when_saved: list[bool] = []
    first = workspace.path("output/validation_images/step_1_validation_0_128x128.png")

    def slowly(self: StockPipeline, latents: torch.Tensor) -> list[Image]:
        deadline = time.monotonic() + PATIENCE
        while len(workspace.metrics()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        steps_when_decoded.append(len(workspace.metrics()))
        return decode(self, latents)

    def noted(*inputs: Any) -> UnfinishedCheckpoint | None:
        exists_when_saved.append(first.exists())
        return write(*inputs)

    monkeypatch.setattr(StockPipeline, "_decode", slowly)
    monkeypatch.setattr(CheckpointWriter, "write", noted)
    workspace.write_config(
        validation_disable=False,
        validation_step_interval=1,
        checkpoint_step_interval=2,
        max_train_steps=2,
        validation_decode_in_background=True,
        disable_benchmark=True,
    )

    assert workspace.train() == 0

    assert steps_when_decoded == [2, 2], "the second step came before the first preview"
    assert exists_when_saved == [True]
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

    output = capsys.readouterr()
    warning = "The preview validation of step 2 is lost: OutOfMemoryError: CUDA out of memory"
    assert warning in output.out + output.err
    (preview,) = workspace.path("output/validation_images").iterdir()
    assert preview.name == "step_4_validation_0_128x128.png"


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
