"""Whole runs of Sana Video on a tiny checkpoint, whose files the stock pipeline loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SanaVideoPipeline

from simpletuner.caching.entry import entry_path, list_keys, read_provenance
from simpletuner.encoding.read import CacheStore
from simpletuner.models.adapter import TextRequest
from tests.tools.clips import write_clip
from tests.tools.families import CPU
from tests.tools.refusals import complaint
from tests.tools.runs import SANA_RUN
from tests.tools.sana_family import make_sana_adapter
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def sana_workspace(tmp_path: Path, sana_checkpoint: Path) -> Workspace:
    """Four pictures, which are clips of one frame, and previews of five frames."""
    settings = {**SANA_RUN, "validation_num_video_frames": 5}
    return Workspace.create(tmp_path / "run", sana_checkpoint, pictures=4, **settings)


def test_sana_video_trains_a_lora_that_the_stock_pipeline_loads(
    sana_workspace: Workspace, sana_checkpoint: Path, capsys: Capture
) -> None:
    sana_workspace.write_config(
        sana_motion_score=30, validation_disable=False, disable_benchmark=True
    )

    assert sana_workspace.train("--flow_schedule_shift=1.0") == 0

    captured = capsys.readouterr()
    assert "flow_schedule_shift: '1.0' is ignored" in captured.out + captured.err
    assert "nan" not in str(sana_workspace.metrics())
    assert sana_workspace.path(
        "output/validation_images/step_4_validation_0_128x128@5.mp4"
    ).exists()
    pipeline = SanaVideoPipeline.from_pretrained(sana_checkpoint)
    pipeline.load_lora_weights(sana_workspace.path("output"))
    assert pipeline.get_active_adapters()


def write_clips(workspace: Workspace) -> None:
    folder = workspace.path("datasets/clips")
    folder.mkdir(parents=True)
    for index in range(3):
        write_clip(folder / f"clip {index}.mp4", seconds=1.0 + index / 4)
        (folder / f"clip {index}.txt").write_text(f"clip {index}")


# Latents of four pictures and three clips, and of the first frames of clips where they are needed.
@pytest.mark.parametrize(
    ("is_i2v", "latents"),
    [
        (True, 4 + 3 + 3),
        pytest.param(False, 4 + 3, marks=pytest.mark.thorough),
    ],
)
def test_clips_and_pictures_train_together_with_and_without_i2v(
    sana_workspace: Workspace, is_i2v: bool, latents: int
) -> None:
    """`video.is_i2v` of a dataset makes a run i2v; its pictures are still trained from noise."""
    clips: dict[str, Any] = {
        **DATASETS[0],
        "id": "clips",
        "dataset_type": "video",
        "instance_data_dir": "datasets/clips",
        "video": {"num_frames": 5, "min_frames": 5, "is_i2v": is_i2v},
    }
    write_clips(sana_workspace)
    sana_workspace.write_datasets([clips, *DATASETS])
    sana_workspace.write_config(
        train_batch_size=1,
        max_train_steps=8,
        num_eval_images=1,
        validation_disable=False,
        validation_disable_unconditional=False,
        disable_benchmark=True,
    )

    assert sana_workspace.train() == 0

    assert "nan" not in str(sana_workspace.metrics())
    previews = list(sana_workspace.path("output/validation_images").glob("*@5.mp4"))
    assert len(previews) == 2, previews
    encoded = list(sana_workspace.path("output/cache/vae").rglob("*.safetensors*"))
    assert len(encoded) == latents


def test_comfyui_files_are_refused(sana_workspace: Workspace, capsys: Capture) -> None:
    message = complaint(sana_workspace, capsys, "plan", "lora_format=comfyui")

    assert "ComfyUI cannot run Sana Video" in message


def test_a_full_fine_tune_of_sana_video_is_a_pipeline(sana_workspace: Workspace) -> None:
    """With the settings of its guide: all weights, with a moving average."""
    sana_workspace.write_config(model_type="full", use_ema=True, max_grad_norm=0.0)

    assert sana_workspace.train() == 0

    SanaVideoPipeline.from_pretrained(sana_workspace.path("output/pipeline"))


def encoded_captions(workspace: Workspace) -> set[str]:
    """The texts of all cached embeddings."""
    store = CacheStore(workspace.path("cache/text"))
    captions = set()
    for key in list_keys(store.folder):
        provenance = read_provenance(entry_path(store.folder, key))
        captions.add(json.loads(provenance["ingredients"])["caption"])
    return captions


def test_a_dataset_can_set_its_motion_score(sana_workspace: Workspace, capsys: Capture) -> None:
    fast = {**DATASETS[0], "id": "fast", "sana_motion_score": "80", "cache_dir_vae": "cache/fast"}
    sana_workspace.write_datasets([DATASETS[0], fast, DATASETS[1]])
    sana_workspace.path("datasets/pictures/p0.txt").write_text("Still. Motion score: 5")
    sana_workspace.write_config(sana_motion_score=10)

    assert sana_workspace.run("cache", "fill") == 0

    captions = encoded_captions(sana_workspace)
    # The score of the run is added by the encoder, so captions are cached without it.
    assert "picture 1" in captions
    assert "picture 1 motion score: 80." in captions
    assert "still. motion score: 5" in captions, "a caption may have a score already"
    assert "still. motion score: 5 motion score: 80." not in captions
    assert "" in captions
    assert not any(caption.startswith(" motion") for caption in captions)
    capsys.readouterr()
    assert sana_workspace.run("cache", "explain", "fast/p1.png") == 0
    assert "caption of 'picture 1 motion score: 80.'" in capsys.readouterr().out


def test_the_score_of_a_run_is_not_added_to_a_caption_that_has_one(sana_checkpoint: Path) -> None:
    def encode(**settings: Any) -> torch.Tensor:
        encoder = make_sana_adapter(sana_checkpoint, **settings).load_text_encoder(
            CPU, torch.float32
        )
        return encoder.encode([TextRequest("picture 1 motion score: 80.")])[0]["prompt_embeds"]

    assert torch.equal(encode(sana_motion_score=10), encode())


def test_captions_with_a_motion_score_are_encoded_separately(sana_workspace: Workspace) -> None:
    texts = sana_workspace.path("cache/text")

    def count_files() -> int:
        return len([path for path in texts.rglob("*") if path.is_file()])

    assert sana_workspace.run("cache", "fill", "sana_motion_score=") == 0
    without_score = count_files()
    assert sana_workspace.run("cache", "fill", "sana_motion_score=30") == 0

    # All captions again, except the empty one, which has no score.
    assert count_files() == without_score + (without_score - 1)
