"""Whole runs with masks in all three families: only what is white is learned."""

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
from tests.tools.runs import LORA, SANA_RUN, assert_equal
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
MASKS = {
    "id": "masks",
    "dataset_type": "conditioning",
    "conditioning_type": "mask",
    "instance_data_dir": "left",
}
MASKED: dict[str, Any] = {**DATASETS[0], "conditioning_data": "masks", "repeats": 3}
MASKED_CLIPS: dict[str, Any] = {
    **MASKED,
    "dataset_type": "video",
    "video": {"num_frames": 5, "min_frames": 5},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "image": {},
    "i2v": {"model_family": "kandinsky5-video", "model_flavour": "i2v-lite-5s", "framerate": 12},
    "sana": {**SANA_RUN, "framerate": 12},
}
CHECKPOINTS = {"image": "t2i_checkpoint", "i2v": "i2v_checkpoint", "sana": "sana_checkpoint"}


def write_half_masks(workspace: Workspace, name: str, width: int, height: int) -> None:
    """A mask of the left half in `left`, and one of the right half in `right`."""
    half = width // 2
    for side, start in (("left", 0), ("right", half)):
        mask = Image.new("L", (width, height))
        mask.paste(255, (start, 0, start + half, height))
        path = workspace.path(f"{side}/{name}.png")
        path.parent.mkdir(exist_ok=True)
        mask.save(path)


def make_masked_workspace(
    folder: Path, checkpoint: Path, family: str = "image", **settings: Any
) -> Workspace:
    """Two files, with a folder of masks each for the left and the right half."""
    is_video = family != "image"
    pictures = 0 if is_video else 2
    workspace = Workspace.create(
        folder, checkpoint, pictures=pictures, **FAMILIES[family], **settings
    )
    for index in range(2):
        if is_video:
            write_clip(workspace.path(f"datasets/pictures/p{index}.mp4"), seconds=1.0)
            workspace.path(f"datasets/pictures/p{index}.txt").write_text(f"clip {index}")
        # Every second picture is a square; all clips have the size of the first one.
        width = 96 if is_video or index == 0 else 64
        write_half_masks(workspace, f"p{index}", width, 64)
    workspace.write_datasets([MASKED_CLIPS if is_video else MASKED, MASKS, DATASETS[1]])
    return workspace


@pytest.fixture(scope="module")
def i2v_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("i2v"), "i2v")


@pytest.mark.parametrize("family", first_of(FAMILIES))
def test_losses_of_two_half_masks_add_up_to_the_unmasked_loss(
    tmp_path: Path, family: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(CHECKPOINTS[family])
    settings = {"cache_dir": "cache", "max_train_steps": 1}
    run = make_masked_workspace(tmp_path, checkpoint, family, **settings)
    masked = MASKED if family == "image" else MASKED_CLIPS

    def first_loss(masks: str, probability: int) -> float:
        run.write_datasets([masked, {**MASKS, "instance_data_dir": masks}, DATASETS[1]])
        output = f"out/{masks}-{probability}"
        assert run.train(f"output_dir={output}", f"masked_loss_probability={probability}") == 0
        return float(run.metrics(output)[0]["optimization_loss"])

    left = first_loss("left", 1)
    right = first_loss("right", 1)
    unmasked = first_loss("left", 0)

    assert left + right == pytest.approx(unmasked, rel=1e-5)
    assert 0.1 < left / unmasked < 0.9


def test_an_interrupted_run_with_masks_continues_bit_exactly(
    tmp_path: Path, t2i_checkpoint: Path
) -> None:
    """Some batches have masks, and the crops of each epoch differ."""
    settings = {
        "max_train_steps": 6,
        "train_batch_size": 1,
        "masked_loss_probability": 0.3,
        "masked_loss_prior": 0.5,
        "masked_loss_normalise": True,
    }
    straight = make_masked_workspace(tmp_path / "straight", t2i_checkpoint, **settings)
    straight.write_datasets([{**MASKED, "crop": True, "repeats": 0}, MASKS, DATASETS[1]])
    assert straight.train() == 0
    stopped = straight.stopped(tmp_path / "stopped", 2)

    assert stopped.train() == 0

    masked_steps = [row["step"] for row in straight.metrics() if "masked_prior_loss" in row]
    assert 0 < len(masked_steps) < 6
    assert stopped.metrics() == straight.metrics()
    assert_equal(load_file(stopped.path(LORA)), load_file(straight.path(LORA)))


def planned_step_seconds(run: Workspace, capsys: Capture, *settings: str) -> float:
    capsys.readouterr()
    assert run.run("plan", "--json", *settings) == 0
    return float(json.loads(capsys.readouterr().out)["seconds"]["step"])


def test_the_plan_shows_masks_and_counts_the_prior(
    tmp_path: Path, t2i_checkpoint: Path, capsys: Capture
) -> None:
    run = make_masked_workspace(tmp_path, t2i_checkpoint)

    assert run.run("plan") == 0
    assert "masks: 50.0% is learned on average" in capsys.readouterr().out

    without_prior = planned_step_seconds(run, capsys, "masked_loss_prior=0")
    with_prior = planned_step_seconds(run, capsys, "masked_loss_prior=1")
    assert with_prior > without_prior, "the base model's forward pass takes time"


def test_settings_of_masks_that_cannot_work_are_reported(
    tmp_path: Path, t2i_checkpoint: Path, capsys: Capture
) -> None:
    run = make_masked_workspace(tmp_path, t2i_checkpoint)
    full = complaint(run, capsys, "plan", "model_type=full", "masked_loss_prior=1")
    assert "needs model_type lora" in full

    run.write_datasets([{**DATASETS[0], "repeats": 3}, MASKS, DATASETS[1]])
    unused = warnings(run, capsys, "masked_loss_normalise=true")
    assert "masked_loss_normalise: has no effect: no dataset that is trained has masks" in unused
    assert "masks: is a conditioning dataset that no dataset lists" in unused
