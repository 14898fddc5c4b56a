"""Two runs with the same seed are the same run, and what only watches a run changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.run.train import CUBLAS_KEY, set_determinism
from tests.tools.runs import LORA
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow


def read_cache(workspace: Workspace) -> dict[str, bytes]:
    """Every cache entry by its path; the index holds times of files and is left out."""
    texts = workspace.path("cache").rglob("*.safetensors*")
    latents = workspace.path("output/cache").rglob("*.safetensors*")
    paths = [*texts, *latents]
    return {str(path.relative_to(workspace.folder)): path.read_bytes() for path in paths}


def losses(run: Workspace) -> list[float]:
    return [row["train_loss"] for row in run.metrics()]


def test_two_runs_without_caches_are_bit_identical(
    tmp_path: Path, t2i_checkpoint: Path, finished: Workspace
) -> None:
    second = Workspace.create(tmp_path / "run", t2i_checkpoint)

    assert second.train() == 0

    entries = read_cache(second)
    assert len(entries) > 8, "the latents of eight pictures, and their captions"
    assert entries == read_cache(finished)
    assert second.metrics() == finished.metrics()
    assert second.path(LORA).read_bytes() == finished.path(LORA).read_bytes()


def test_another_seed_gives_another_run(workspace: Workspace, finished: Workspace) -> None:
    assert workspace.train("seed=8") == 0

    assert workspace.metrics() != finished.metrics()


@pytest.mark.parametrize(
    "settings",
    [
        {"validation_disable": False, "validation_step_interval": 1, "use_ema": True},
        {"report_to": "tensorboard", "checkpoint_step_interval": 1},
        {"dataloader_prefetch": True, "compress_disk_cache": False, "max_workers": 1},
        {"gradient_checkpointing": False, "deterministic": True},
    ],
)
def test_previews_trackers_and_loader_settings_do_not_change_the_result(
    workspace: Workspace,
    finished: Workspace,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CUBLAS_KEY, "")
    workspace.write_config(**settings)

    assert workspace.train() == 0

    assert losses(workspace) == losses(finished)
    assert workspace.path(LORA).read_bytes() == finished.path(LORA).read_bytes()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    set_determinism(False)
    assert is_deterministic is ("deterministic" in settings)
    assert os.environ[CUBLAS_KEY] == (":4096:8" if is_deterministic else "")


def test_random_crops_differ_by_epoch_and_repeat_by_seed(
    tmp_path: Path, t2i_checkpoint: Path
) -> None:
    """Eight pictures in batches of two: step 5 is the first one of the second epoch."""
    random_crops = {
        **DATASETS[0],
        "crop": True,
        "crop_style": "random",
        "resolution": 64,
        "repeats": 0,
    }
    first = Workspace.create(tmp_path / "first", t2i_checkpoint, max_train_steps=5)
    first.write_datasets([random_crops, DATASETS[1]])
    second = first.copy(tmp_path / "second")

    assert first.train() == 0
    assert second.train() == 0

    assert second.metrics() == first.metrics()
    latents = [path for path in read_cache(first) if path.startswith("output/cache/vae")]
    assert len(latents) > 8, "the second epoch has crops of its own"
