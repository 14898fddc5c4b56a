"""Two cold runs with one seed agree, and whatever only watches changes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from simpletuner.run.train import CUBLAS_KEY, set_determinism
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

LORA = "output/pytorch_lora_weights.safetensors"


def cache_files(workspace: Workspace) -> dict[str, bytes]:
    """Every cache entry by its path; the index holds times of files and is left out."""
    roots = [workspace.path("cache"), workspace.path("output/cache")]
    paths = [path for root in roots for path in sorted(root.rglob("*.safetensors*"))]
    return {str(path.relative_to(workspace.folder)): path.read_bytes() for path in paths}


def test_two_runs_without_caches_are_bit_identical(
    tmp_path: Path, t2i_checkpoint: Path, finished: Workspace
) -> None:
    one = finished
    two = Workspace.create(tmp_path / "run", t2i_checkpoint)
    assert two.train() == 0
    assert cache_files(one) == cache_files(two)
    assert len(cache_files(one)) > 8
    assert one.metrics() == two.metrics()
    assert one.path(LORA).read_bytes() == two.path(LORA).read_bytes()


def test_another_seed_gives_another_run(workspace: Workspace, finished: Workspace) -> None:
    assert workspace.train("seed=8") == 0
    assert workspace.metrics() != finished.metrics()


@pytest.mark.parametrize(
    "watching",
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
    watching: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CUBLAS_KEY, "")
    workspace.write_config(**watching)
    assert workspace.train() == 0
    is_fixed = "deterministic" in watching
    assert torch.are_deterministic_algorithms_enabled() is is_fixed
    assert os.environ[CUBLAS_KEY] == (":4096:8" if is_fixed else "")
    set_determinism(False)
    losses = [[line["train_loss"] for line in run.metrics()] for run in (finished, workspace)]
    assert losses[0] == losses[1]
    assert finished.path(LORA).read_bytes() == workspace.path(LORA).read_bytes()


def test_random_crops_differ_by_epoch_and_repeat_by_seed(
    tmp_path: Path, t2i_checkpoint: Path
) -> None:
    entry = {**DATASETS[0], "crop": True, "crop_style": "random", "resolution": 64, "repeats": 0}
    runs = [
        Workspace.create(tmp_path / name, t2i_checkpoint, max_train_steps=5)
        for name in ("one", "two")
    ]
    for run in runs:
        run.write_datasets([entry, DATASETS[1]])
        assert run.train() == 0
    assert runs[0].metrics() == runs[1].metrics()
    latents = [path for path in cache_files(runs[0]) if path.startswith("output/cache/vae")]
    assert len(latents) > 8, "the second epoch has crops of its own"
