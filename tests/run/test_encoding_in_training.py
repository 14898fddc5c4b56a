"""Latents that training encodes, when it first uses them or every time: the same run, and the plan
counts the VAE.
"""

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
SETTINGS: dict[str, Any] = {
    "max_train_steps": STEPS,
    "checkpoint_step_interval": 3,
    "eval_steps_interval": 2,
}
KEYS = ("vae_cache_ondemand", "vae_cache_disable")


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory, t2i_checkpoint: Path) -> Workspace:
    """A run whose latents are encoded before training."""
    workspace = make(tmp_path_factory.mktemp("ahead") / "run", t2i_checkpoint)
    assert workspace.train() == 0
    return workspace


@pytest.fixture
def workspace(workspace: Workspace) -> Workspace:
    """With nothing cached."""
    shutil.rmtree(workspace.path("output/cache"))
    return workspace


def make(folder: Path, checkpoint: Path, **settings: Any) -> Workspace:
    workspace = Workspace.create(folder, checkpoint, pictures=4, **SETTINGS, **settings)
    workspace.add_pictures(EVAL["instance_data_dir"], 2, seed=9)
    workspace.write_datasets(ENTRIES)
    return workspace


def latents(workspace: Workspace) -> set[str]:
    return {path.name for path in workspace.path("output/cache/vae").rglob("*.safetensors*")}


def budget_of(workspace: Workspace, *settings: str) -> Budget:
    with workspace.inside():
        return weigh_plan(parse_arguments(list(settings)))


@pytest.mark.parametrize("key", first_of(KEYS))
def test_encoding_during_training_gives_the_same_run(
    ahead: Workspace, key: str, tmp_path: Path
) -> None:
    checkpoint = ahead.path("config/config.json").read_text().split('path": "')[1].split('"')[0]
    workspace = make(tmp_path / "run", Path(checkpoint), **{key: True})
    assert workspace.run("cache", "fill") == 0
    assert latents(workspace) == set()
    assert workspace.train("max_train_steps=4") == 0
    assert workspace.train() == 0
    assert_same_run(ahead, workspace)
    assert latents(workspace) == (latents(ahead) if key == "vae_cache_ondemand" else set())


@pytest.mark.parametrize("key", KEYS)
def test_the_plan_counts_the_vae_beside_training(
    key: str, workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, asked = (budget_of(workspace, f"{key}={value}") for value in ("false", "true"))
    names = [[phase.name for phase in budget.phases] for budget in (plain, asked)]
    assert "encoding pictures" in names[0]
    assert "encoding pictures" not in names[1]
    before, after = ({phase.name: phase.device for phase in one.phases} for one in (plain, asked))
    training = [name for name in before if name.startswith("training")]
    # One picture at a time beside the step, a batch of them before it.
    assert all(0 < after[name] - before[name] <= before["encoding pictures"] for name in training)
    assert workspace.run("plan", f"{key}=true") == 0
    assert "Encoded in training: 8 pictures" in capsys.readouterr().out


def test_with_everything_cached_no_vae_is_loaded(filled: Workspace) -> None:
    budget = budget_of(filled, "vae_cache_ondemand=true")
    assert not budget.workload.encoded_in_training


def test_a_dataset_setting_overrides_the_run_setting(workspace: Workspace) -> None:
    workspace.write_datasets([{**DATASETS[0], "vae_cache_disable": False}, DATASETS[1]])
    assert budget_of(workspace, "vae_cache_disable=true").workload.encoded


def test_a_file_that_cannot_be_decoded_is_named(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def decode(source: bytes) -> np.ndarray:
        raise files.MediaError("its pixels are damaged")

    monkeypatch.setattr(decoding.pictures, "decode", decode)
    assert workspace.train("vae_cache_ondemand=true") == 2
    assert re.search(r"pictures/p\d.png its pixels are damaged; remove it", capsys.readouterr().err)
