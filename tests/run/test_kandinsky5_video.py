"""Whole runs of Kandinsky 5 Video on tiny checkpoints: clips in, a verified LoRA and playing
previews out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import av
import pytest
from diffusers import Kandinsky5T2VPipeline
from safetensors.torch import load_file

from simpletuner.models.kandinsky5.loading import load_processor
from tests.tools.refusals import warnings
from tests.tools.runs import CLIPS, make_clip_workspace
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def t2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("t2v"), "t2v")


@pytest.fixture(scope="module")
def i2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("i2v"), "i2v")


def test_clips_train_a_lora_that_the_stock_pipeline_loads(
    tmp_path: Path, t2v: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = make_clip_workspace(tmp_path / "run", t2v, "t2v-lite-sft-5s")
    workspace.write_config(validation_disable=False, validation_num_video_frames=5)
    assert workspace.run("plan") == 0
    assert workspace.train() == 0
    told = capsys.readouterr().out
    assert "Cache of clips: 0 of 3 exist" in told
    assert "Encoding clips: 3 clips" in told
    preview = workspace.path("output/validation_images/step_3_validation_0_128x128@5.mp4")
    with av.open(str(preview)) as clip:
        stream = clip.streams.video[0]
        assert (stream.width, stream.height, float(stream.average_rate or 0)) == (128, 128, 12.0)
        assert len(list(clip.decode(video=0))) == 5
    assert workspace.path("output/benchmarks/base_model/validation_128x128@5_0.mp4").exists()
    pipeline = Kandinsky5T2VPipeline.from_pretrained(t2v, tokenizer=load_processor(t2v))
    pipeline.load_lora_weights(workspace.path("output"))
    report = workspace.path("output/training_report.html").read_text(encoding="utf-8")
    assert "<video" in report
    assert "clip 0.mp4" in report


def test_i2v_trains_on_clips_alone(tmp_path: Path, i2v: Path) -> None:
    workspace = make_clip_workspace(tmp_path / "run", i2v, "i2v-lite-5s")
    workspace.write_config(validation_disable=False, disable_benchmark=True)
    assert workspace.train() == 0
    latents = list(workspace.path("output/cache/vae").rglob("*.safetensors*"))
    assert len(latents) == 6, "each clip, and its first frame alone"
    assert all(line["train_loss"] > 0 for line in workspace.metrics())
    assert workspace.path("output/validation_images/step_3_validation_0_128x128@17.mp4").exists()


def test_a_full_fine_tune_of_clips_is_a_pipeline(tmp_path: Path, t2v: Path) -> None:
    workspace = make_clip_workspace(tmp_path / "run", t2v, "t2v-lite-pretrain-5s")
    assert workspace.train("model_type=full", "--use_ema", "learning_rate=1e-4") == 0
    Kandinsky5T2VPipeline.from_pretrained(
        workspace.path("output/pipeline"),
        tokenizer=load_processor(workspace.path("output/pipeline")),
    )


def test_an_interrupted_clip_run_continues_bit_exactly(tmp_path: Path, i2v: Path) -> None:
    straight = make_clip_workspace(tmp_path / "straight", i2v, "i2v-lite-5s")
    straight.write_config(checkpoint_step_interval=1)
    assert straight.train() == 0
    runs = [straight, straight.stopped(tmp_path / "broken", 2)]
    assert runs[1].train() == 0
    assert runs[0].metrics() == runs[1].metrics()
    weights = [load_file(run.path("output/pytorch_lora_weights.safetensors")) for run in runs]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_pictures_can_be_trained_beside_clips(tmp_path: Path, t2v: Path) -> None:
    workspace = make_clip_workspace(tmp_path / "run", t2v, "t2v-lite-sft-5s")
    workspace.add_pictures("datasets/stills", 2)
    stills = {**DATASETS[0], "id": "stills", "instance_data_dir": "datasets/stills"}
    workspace.write_datasets([CLIPS, stills, DATASETS[1]])
    assert workspace.train("max_train_steps=6") == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"validation_num_video_frames": 20}, "17 and 21"),
        ({"model_flavour": "i2v-lite-5s"}, "does not take a source picture"),
        ({"model_flavour": "i2v-lite-5s", "validation_num_video_frames": 13}, "NaN below 17"),
        ({"model_flavour": "i2v-lite-pretrain-5s"}, "t2v-lite-sft-5s"),
        ({"rope_scale": "2,2"}, "three numbers"),
    ],
)
def test_settings_that_clips_cannot_use_are_refused(
    tmp_path: Path,
    t2v: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any],
    words: str,
) -> None:
    workspace = make_clip_workspace(tmp_path / "run", t2v, "t2v-lite-sft-5s")
    config = t2v / "transformer" / "config.json"
    original = config.read_text()
    if "does not take" in words:
        config.write_text(original.replace('"visual_cond": true', '"visual_cond": false'))
    try:
        workspace.write_config(**change)
        assert workspace.train("--dry-run") == 2
    finally:
        config.write_text(original)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({}, ""),  # 80x48 and 128x128 have one scale, the one outside 480..854
        (
            {"validation_resolution": "768x512"},
            "rope_scale: clips of pictures are trained at 80x48. If you will sample at 768x512, "
            "as previews are, ignore this; else set crop_aspect closest: 80x48 is sampled with "
            "RoPE scale 1,3.16,3.16, and trained with 1,2,2.",
        ),
        ({"validation_resolution": "768x512", "rope_scale": "1,2,2"}, ""),
        (
            {"rope_scale": "1,2,2"},
            "1,2,2 is trained; the pipeline samples 128x128 with another scale.",
        ),
        (
            {"validation_resolution": "768x512,1280x768"},
            "the pipeline samples 1280x768 with another scale.",
        ),
    ],
)
def test_training_and_sampling_at_different_rope_scales_warns(
    tmp_path: Path, t2v: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], told: str
) -> None:
    workspace = make_clip_workspace(tmp_path / "run", t2v, "t2v-lite-sft-5s")
    workspace.write_config(**change)
    told_of = warnings(workspace, capsys)
    assert told in told_of
    assert bool(told) == ("scale" in told_of)


def test_a_motion_score_has_no_effect(
    tmp_path: Path, t2v: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = make_clip_workspace(tmp_path / "run", t2v, "t2v-lite-sft-5s")
    workspace.write_datasets([{**CLIPS, "sana_motion_score": 30}, DATASETS[1]])
    assert (
        "pictures.sana_motion_score: has no effect: Kandinsky 5 Video does not use it"
        in warnings(workspace, capsys)
    )


def test_block_sparse_attention_plans_with_measured_densities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(tmp_path / "nabla", "t2v", nabla=True)
    workspace = make_clip_workspace(tmp_path / "run", checkpoint, "t2v-lite-sft-10s")
    workspace.write_datasets(
        [{**CLIPS, "resolution": 128, "crop": True, "crop_style": "center"}, DATASETS[1]]
    )
    on_a_gpu = ("--dry-run", "--device-memory=80")
    assert workspace.train(*on_a_gpu) == 0
    assert (
        "attention density (share of the tiles visited): 25 % at 128x128@5 (assumed)"
        in capsys.readouterr().out
    )
    assert workspace.train("max_train_steps=1") == 0
    density = workspace.metrics()[0]["attention_density"]
    assert f", attention density {density * 100:.0f} %" in capsys.readouterr().out
    measured = {"densities": {2 * 8 * 8: density}}
    outcomes = {
        "a GPU with 80 GiB": {"kandinsky5-video t2v-lite-sft-10s, lora, 128x128@5": measured}
    }
    workspace.path("cache").mkdir(exist_ok=True)
    workspace.path("cache/outcomes.json").write_text(json.dumps(outcomes))
    assert workspace.train(*on_a_gpu) == 0
    assert f"{density * 100:.0f} % at 128x128@5 (measured)" in capsys.readouterr().out
    workspace.write_datasets([{**CLIPS, "aspect_bucket_alignment": "16"}, DATASETS[1]])
    assert workspace.train("--dry-run", "output_dir=other") == 2
    assert "128" in capsys.readouterr().err
