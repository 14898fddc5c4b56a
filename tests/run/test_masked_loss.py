"""Whole runs with masks in all three families: what is white is learned, stop and go, the
messages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file

from tests.tools.cases import first_of
from tests.tools.clips import write_clip
from tests.tools.refusals import complaint, warnings
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

RESULT = "output/pytorch_lora_weights.safetensors"
MASKS = {
    "id": "masks",
    "dataset_type": "conditioning",
    "conditioning_type": "mask",
    "instance_data_dir": "left",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "image": {},
    "i2v": {"model_family": "kandinsky5-video", "model_flavour": "i2v-lite-5s", "framerate": 12},
    "sana": {"model_family": "sanavideo", "model_flavour": "2b-480p", "framerate": 12},
}


def make_workspace(folder: Path, checkpoint: Path, name: str, **settings: Any) -> Workspace:
    """Two files with a folder of masks each for the left and the right half."""
    is_video = name != "image"
    workspace = Workspace.create(
        folder, checkpoint, pictures=0 if is_video else 2, **FAMILIES[name], **settings
    )
    own = {**DATASETS[0], "conditioning_data": "masks", "repeats": 3}
    if is_video:
        own |= {"dataset_type": "video", "video": {"num_frames": 5, "min_frames": 5}}
    for index in range(2):
        if is_video:
            write_clip(workspace.path(f"datasets/pictures/p{index}.mp4"), seconds=1.0)
            workspace.path(f"datasets/pictures/p{index}.txt").write_text(f"clip {index}")
        size = (96, 64) if is_video or index % 2 == 0 else (64, 64)
        for side in ("left", "right"):
            mask = Image.new("L", size)
            start = 0 if side == "left" else size[0] // 2
            mask.paste(255, (start, 0, start + size[0] // 2, size[1]))
            path = workspace.path(f"{side}/p{index}.png")
            path.parent.mkdir(exist_ok=True)
            mask.save(path)
    workspace.write_datasets([own, MASKS, DATASETS[1]])
    return workspace


@pytest.fixture(scope="module")
def i2v_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("i2v"), "i2v")


@pytest.mark.parametrize("name", first_of(FAMILIES))
def test_losses_of_two_half_masks_add_up_to_the_unmasked_loss(
    tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    fixture = {"image": "t2i_checkpoint", "i2v": "i2v_checkpoint", "sana": "sana_checkpoint"}[name]
    run = make_workspace(
        tmp_path, request.getfixturevalue(fixture), name, cache_dir="cache", max_train_steps=1
    )
    losses = {}
    for side, share in (("left", 1), ("right", 1), ("whole", 0)):
        folder = "left" if side == "whole" else side
        entries = json.loads(run.path("config/multidatabackend.json").read_text())
        entries[1]["instance_data_dir"] = folder
        run.write_datasets(entries)
        assert run.train(f"output_dir=out/{side}", f"masked_loss_probability={share}") == 0
        losses[side] = run.metrics(f"out/{side}")[0]["optimization_loss"]
    assert losses["left"] + losses["right"] == pytest.approx(losses["whole"], rel=1e-5)
    assert 0.1 < losses["left"] / losses["whole"] < 0.9


def test_an_interrupted_run_with_masks_continues_bit_exactly(
    tmp_path: Path, t2i_checkpoint: Path
) -> None:
    """With masks in some of the batches, the prior, and other crops in each epoch."""
    settings = {
        "masked_loss_probability": 0.3,
        "masked_loss_prior": 0.5,
        "masked_loss_normalise": True,
    }
    straight = make_workspace(tmp_path / "straight", t2i_checkpoint, "image", **settings)
    entries = json.loads(straight.path("config/multidatabackend.json").read_text())
    entries[0] |= {"crop": True, "repeats": 0}
    straight.write_datasets(entries)
    assert straight.train("max_train_steps=6", "train_batch_size=1") == 0
    assert any("masked_prior_loss" in line for line in straight.metrics())
    assert not all("masked_prior_loss" in line for line in straight.metrics())
    runs = [straight, straight.stopped(tmp_path / "broken", 2)]
    assert runs[1].train("max_train_steps=6", "train_batch_size=1") == 0
    assert runs[0].metrics() == runs[1].metrics()
    one, other = (load_file(run.path(RESULT)) for run in runs)
    assert all((one[key] == other[key]).all() for key in one)


def test_the_plan_shows_masks_and_checks_their_settings(
    tmp_path: Path, t2i_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_workspace(tmp_path, t2i_checkpoint, "image")
    assert run.run("plan") == 0
    assert "masks: 50.0% is learned on average" in capsys.readouterr().out
    seconds = [
        json.loads(plan_of(run, capsys, f"masked_loss_prior={weight}"))["seconds"]["step"]
        for weight in (0, 1)
    ]
    assert seconds[1] > seconds[0], "the base model's forward pass takes time"
    assert "needs model_type lora" in complaint(
        run, capsys, "plan", "model_type=full", "masked_loss_prior=1"
    )
    run.write_datasets([{**DATASETS[0], "repeats": 3}, MASKS, DATASETS[1]])
    warned = warnings(run, capsys, "masked_loss_normalise=true")
    assert "masked_loss_normalise: has no effect: no dataset that is trained has masks" in warned
    assert "masks: is a conditioning dataset that no dataset lists" in warned


def plan_of(run: Workspace, capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    capsys.readouterr()
    assert run.run("plan", "--json", *settings) == 0
    return capsys.readouterr().out
