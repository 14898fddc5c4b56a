"""Latents that are encoded during training give the same run, and the plan counts the VAE."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpletuner.annexes.fitting.ready import weigh_plan
from simpletuner.budget.budget import Budget
from simpletuner.config.sources import parse_arguments
from simpletuner.data import files
from simpletuner.encoding import decoding
from tests.tools.cases import first_of
from tests.tools.runs import STEPS, assert_same_run
from tests.tools.workspace import DATASETS, EVAL, Workspace

pytestmark = pytest.mark.slow(4)

# Both epochs have crops of their own, and evaluation reads latents in another thread than training
# does.
ENTRIES = [{**DATASETS[0], "crop": True, "crop_style": "random"}, EVAL, DATASETS[1]]
EVALUATED_RUN: dict[str, Any] = {
    "max_train_steps": STEPS,
    "checkpoint_step_interval": 3,
    "eval_steps_interval": 2,
}
KEYS = ("vae_cache_ondemand", "vae_cache_disable")


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> Workspace:
    """A run whose latents are encoded before training."""
    workspace = make_evaluated_workspace(tmp_path_factory.mktemp("ahead") / "run", t2i_checkpoint)
    assert workspace.train() == 0
    return workspace


@pytest.fixture
def workspace(workspace: Workspace) -> Workspace:
    """Eight pictures, none of which is cached."""
    shutil.rmtree(workspace.path("output/cache"))
    return workspace


def make_evaluated_workspace(folder: Path, checkpoint: Path, **settings: Any) -> Workspace:
    """Four pictures that are trained and two that are evaluated."""
    workspace = Workspace.create(folder, checkpoint, pictures=4, **EVALUATED_RUN, **settings)
    workspace.add_pictures(EVAL["instance_data_dir"], 2, seed=9)
    workspace.write_datasets(ENTRIES)
    return workspace


def cached_latents(workspace: Workspace) -> set[str]:
    return {path.name for path in workspace.path("output/cache/vae").rglob("*.safetensors*")}


def make_budget(workspace: Workspace, *settings: str) -> Budget:
    with workspace.inside():
        return weigh_plan(parse_arguments(list(settings)))


def device_memory(budget: Budget) -> dict[str, float]:
    """What each phase of a run takes on the device."""
    return {phase.name: phase.device for phase in budget.phases}


@pytest.mark.parametrize("key", first_of(KEYS))
def test_encoding_during_training_gives_the_same_run(
    tmp_path: Path, ahead: Workspace, t2i_checkpoint: Path, key: str
) -> None:
    workspace = make_evaluated_workspace(tmp_path / "run", t2i_checkpoint, **{key: True})
    assert workspace.run("cache", "fill") == 0
    assert cached_latents(workspace) == set()

    assert workspace.train("max_train_steps=4") == 0
    assert workspace.train() == 0

    assert_same_run(ahead, workspace)
    kept = cached_latents(ahead) if key == "vae_cache_ondemand" else set()
    assert cached_latents(workspace) == kept


@pytest.mark.parametrize("key", KEYS)
def test_the_plan_counts_the_vae_beside_training(
    key: str, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    before = device_memory(make_budget(workspace, f"{key}=false"))
    during = device_memory(make_budget(workspace, f"{key}=true"))

    assert "encoding pictures" in before
    assert "encoding pictures" not in during
    for phase in [name for name in before if name.startswith("training")]:
        # One picture is encoded at a time beside a step, but a batch of them before training.
        vae = during[phase] - before[phase]
        assert 0 < vae <= before["encoding pictures"]
    assert workspace.run("plan", f"{key}=true") == 0
    assert "Encoded in training: 8 pictures" in capsys.readouterr().out


def test_with_everything_cached_no_vae_is_loaded(filled: Workspace) -> None:
    budget = make_budget(filled, "vae_cache_ondemand=true")

    assert not budget.workload.encoded_in_training


def test_a_dataset_setting_overrides_the_run_setting(workspace: Workspace) -> None:
    workspace.write_datasets([{**DATASETS[0], "vae_cache_disable": False}, DATASETS[1]])

    budget = make_budget(workspace, "vae_cache_disable=true")

    assert budget.workload.encoded


def test_a_file_that_cannot_be_decoded_is_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(source: bytes) -> np.ndarray:
        raise files.MediaError("its pixels are damaged")

    monkeypatch.setattr(decoding.pictures, "decode", fail)

    assert workspace.train("vae_cache_ondemand=true") == 2

    error = capsys.readouterr().err
    assert re.search(r"pictures/p\d.png its pixels are damaged; remove it", error)
