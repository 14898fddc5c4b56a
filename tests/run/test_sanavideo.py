"""Whole runs of Sana Video on a tiny checkpoint, from settings to files that the stock pipeline
loads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from diffusers import SanaVideoPipeline

from simpletuner.caching.entry import entry_path, list_keys, read_provenance
from simpletuner.encoding.read import CacheStore
from simpletuner.models.adapter import TextRequest
from tests.tools.cases import first_of
from tests.tools.clips import write_clip
from tests.tools.families import CPU
from tests.tools.refusals import complaint
from tests.tools.sana_family import make_sana_adapter
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow


@pytest.fixture
def sana_workspace(tmp_path: Path, sana_checkpoint: Path) -> Workspace:
    """Pictures as clips of one frame, and a family that renders five frames."""
    settings = {
        "model_family": "sanavideo",
        "model_flavour": "2b-480p",
        "validation_num_video_frames": 5,
    }
    return Workspace.create(tmp_path / "run", sana_checkpoint, pictures=4, **settings)


def test_sana_video_trains_a_lora_that_the_stock_pipeline_loads(
    sana_workspace: Workspace, sana_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--flow_schedule_shift=1.0", "--sana_motion_score=30", "--validation_disable=false")
    assert sana_workspace.train(*settings, "--disable_benchmark") == 0
    assert "flow_schedule_shift: '1.0' is ignored" in "".join(capsys.readouterr())
    assert all("nan" not in str(line) for line in sana_workspace.metrics())
    names = {path.name for path in sana_workspace.path("output/validation_images").iterdir()}
    assert "step_4_validation_0_128x128@5.mp4" in names
    pipeline = SanaVideoPipeline.from_pretrained(sana_checkpoint)
    pipeline.load_lora_weights(sana_workspace.path("output"))
    assert pipeline.get_active_adapters()


@pytest.mark.parametrize("is_i2v", first_of([True, False]))
def test_clips_and_pictures_train_together_with_and_without_i2v(
    sana_workspace: Workspace, is_i2v: bool
) -> None:
    """`video.is_i2v` of a dataset decides what the run is; pictures beside its clips are trained
    from noise.
    """
    clips = {
        **DATASETS[0],
        "id": "clips",
        "dataset_type": "video",
        "instance_data_dir": "datasets/clips",
    }
    clips["video"] = {"num_frames": 5, "min_frames": 5, "is_i2v": is_i2v}
    for index in range(3):
        path = sana_workspace.path(f"datasets/clips/clip {index}.mp4")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_clip(path, seconds=1.0 + index / 4)
        path.with_suffix(".txt").write_text(f"clip {index}")
    sana_workspace.write_datasets([clips, *DATASETS])
    settings = (
        "--validation_disable=false",
        "--validation_disable_unconditional=false",
        "--train_batch_size=1",
        "--num_eval_images=1",
        "--max_train_steps=8",
    )
    assert sana_workspace.train(*settings, "--disable_benchmark") == 0
    assert "nan" not in str(sana_workspace.metrics())
    previews = [
        path.name for path in sana_workspace.path("output/validation_images").glob("*@5.mp4")
    ]
    assert len(previews) == 2, previews
    encoded = list(sana_workspace.path("output/cache/vae").rglob("*.safetensors*"))
    assert len(encoded) == 4 + (6 if is_i2v else 3), (
        "pictures, clips, and the clips' first frames where they are needed"
    )


def test_comfyui_files_are_refused(
    sana_workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "ComfyUI cannot run Sana Video" in complaint(
        sana_workspace, capsys, "plan", "lora_format=comfyui"
    )


def test_a_full_fine_tune_of_sana_video_is_a_pipeline(sana_workspace: Workspace) -> None:
    """As the guide trains: all weights, with a moving average."""
    assert sana_workspace.train("--model_type=full", "--use_ema=true", "--max_grad_norm=0.0") == 0
    SanaVideoPipeline.from_pretrained(sana_workspace.path("output/pipeline"))


def test_a_dataset_can_set_its_motion_score(
    sana_workspace: Workspace, sana_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {**DATASETS[0], "id": "fast", "sana_motion_score": "80", "cache_dir_vae": "cache/fast"}
    sana_workspace.write_datasets([DATASETS[0], own, DATASETS[1]])
    sana_workspace.path("datasets/pictures/p0.txt").write_text("Still. Motion score: 5")
    assert sana_workspace.run("cache", "fill", "--sana_motion_score=10") == 0
    found = {
        json.loads(read_provenance(entry_path(store.folder, key))["ingredients"])["caption"]
        for store in [CacheStore(sana_workspace.path("cache/text"))]
        for key in list_keys(store.folder)
    }
    assert {"picture 1", "picture 1 motion score: 80.", "still. motion score: 5", ""} <= found
    assert "still. motion score: 5 motion score: 80." not in found
    assert not any(text.startswith(" motion") for text in found)
    capsys.readouterr()
    assert sana_workspace.run("cache", "explain", "fast/p1.png", "--sana_motion_score=10") == 0
    assert "caption of 'picture 1 motion score: 80.'" in capsys.readouterr().out
    encoder = make_sana_adapter(sana_checkpoint, sana_motion_score=10).load_text_encoder(
        CPU, torch.float32
    )
    plain = make_sana_adapter(sana_checkpoint).load_text_encoder(CPU, torch.float32)
    given, meant = (
        each.encode([TextRequest("picture 1 motion score: 80.")])[0] for each in (encoder, plain)
    )
    assert torch.equal(given["prompt_embeds"], meant["prompt_embeds"]), (
        "the run's score is not added to it"
    )


def test_captions_with_a_motion_score_are_encoded_separately(sana_workspace: Workspace) -> None:
    texts = sana_workspace.path("cache/text")
    counts = []
    for score in ("", "30"):
        assert sana_workspace.train(f"--sana_motion_score={score}", f"--output_dir=run{score}") == 0
        counts.append(len([path for path in texts.rglob("*") if path.is_file()]))
    captions = counts[0] - 1  # all but the empty caption, which has no score
    assert counts[1] == counts[0] + captions
