"""Whole runs of Kandinsky 5 Video: clips in, a verified LoRA and playing previews out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from diffusers import Kandinsky5T2VPipeline
from diffusers.models.transformers.transformer_kandinsky import Kandinsky5Transformer3DModel
from safetensors.torch import load_file

from simpletuner.models.kandinsky5.loading import load_processor
from tests.tools.refusals import warnings
from tests.tools.runs import CLIPS, LORA, assert_equal, make_clip_workspace
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def t2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("t2v"), "t2v")


@pytest.fixture(scope="module")
def i2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("i2v"), "i2v")


@pytest.fixture
def clips(tmp_path: Path, t2v: Path) -> Workspace:
    return make_clip_workspace(tmp_path / "run", t2v, "t2v-lite-sft-5s")


def test_clips_train_a_lora_that_the_stock_pipeline_loads(
    clips: Workspace, t2v: Path, capsys: Capture
) -> None:
    clips.write_config(validation_disable=False, validation_num_video_frames=5)

    assert clips.run("plan") == 0
    assert clips.train() == 0

    output = capsys.readouterr().out
    assert "Cache of clips: 0 of 3 exist" in output
    assert "Encoding clips: 3 clips" in output
    preview = clips.path("output/validation_images/step_3_validation_0_128x128@5.mp4")
    with av.open(str(preview)) as clip:
        stream = clip.streams.video[0]
        assert stream.width == 128
        assert stream.height == 128
        assert float(stream.average_rate or 0) == 12
        assert len(list(clip.decode(video=0))) == 5
    assert clips.path("output/benchmarks/base_model/validation_128x128@5_0.mp4").exists()
    pipeline = Kandinsky5T2VPipeline.from_pretrained(t2v, tokenizer=load_processor(t2v))
    pipeline.load_lora_weights(clips.path("output"))
    report = clips.path("output/training_report.html").read_text(encoding="utf-8")
    assert "<video" in report
    assert "clip 0.mp4" in report


def test_i2v_trains_on_clips_alone(tmp_path: Path, i2v: Path) -> None:
    workspace = make_clip_workspace(tmp_path / "run", i2v, "i2v-lite-5s")
    workspace.write_config(validation_disable=False, disable_benchmark=True)

    assert workspace.train() == 0

    latents = list(workspace.path("output/cache/vae").rglob("*.safetensors*"))
    assert len(latents) == 6, "three clips, and the first frame of each alone"
    assert all(row["train_loss"] > 0 for row in workspace.metrics())
    assert workspace.path("output/validation_images/step_3_validation_0_128x128@17.mp4").exists()


def test_a_full_fine_tune_of_clips_is_a_pipeline(tmp_path: Path, t2v: Path) -> None:
    workspace = make_clip_workspace(tmp_path / "run", t2v, "t2v-lite-pretrain-5s")

    assert workspace.train("model_type=full", "--use_ema", "learning_rate=1e-4") == 0

    folder = workspace.path("output/pipeline")
    Kandinsky5T2VPipeline.from_pretrained(folder, tokenizer=load_processor(folder))


def test_an_interrupted_clip_run_continues_bit_exactly(tmp_path: Path, i2v: Path) -> None:
    straight = make_clip_workspace(tmp_path / "straight", i2v, "i2v-lite-5s")
    straight.write_config(checkpoint_step_interval=1)
    assert straight.train() == 0
    stopped = straight.stopped(tmp_path / "stopped", 2)

    assert stopped.train() == 0

    assert stopped.metrics() == straight.metrics()
    assert_equal(load_file(stopped.path(LORA)), load_file(straight.path(LORA)))


def test_pictures_can_be_trained_beside_clips(clips: Workspace) -> None:
    clips.add_pictures("datasets/stills", 2)
    stills = {**DATASETS[0], "id": "stills", "instance_data_dir": "datasets/stills"}
    clips.write_datasets([CLIPS, stills, DATASETS[1]])

    assert clips.train("max_train_steps=6") == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"validation_num_video_frames": 20}, "17 and 21"),
        ({"model_flavour": "i2v-lite-5s", "validation_num_video_frames": 13}, "NaN below 17"),
        ({"model_flavour": "i2v-lite-pretrain-5s"}, "t2v-lite-sft-5s"),
        ({"rope_scale": "2,2"}, "three numbers"),
    ],
)
def test_settings_that_clips_cannot_use_are_refused(
    clips: Workspace, capsys: Capture, change: dict[str, Any], words: str
) -> None:
    clips.write_config(**change)

    assert clips.train("--dry-run") == 2

    assert words in capsys.readouterr().err


def test_i2v_needs_a_checkpoint_that_takes_a_source_picture(
    tmp_path: Path, clips: Workspace, t2v: Path, capsys: Capture
) -> None:
    checkpoint = tmp_path / "without-source"
    shutil.copytree(t2v, checkpoint)
    config = checkpoint / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"visual_cond": true', '"visual_cond": false'))
    clips.write_config(model_flavour="i2v-lite-5s", pretrained_model_name_or_path=str(checkpoint))

    assert clips.train("--dry-run") == 2

    assert "does not take a source picture" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            {"validation_resolution": "768x512"},
            "rope_scale: clips of pictures are trained at 80x48. If you will sample at 768x512, "
            "as previews are, ignore this; else set crop_aspect closest: 80x48 is sampled with "
            "RoPE scale 1,3.16,3.16, and trained with 1,2,2.",
            id="previews have another scale",
        ),
        pytest.param(
            {"rope_scale": "1,2,2"},
            "1,2,2 is trained; the pipeline samples 128x128 with another scale.",
            id="the setting has another scale",
        ),
        pytest.param(
            {"validation_resolution": "768x512,1280x768"},
            "the pipeline samples 1280x768 with another scale.",
            id="one of two previews has another scale",
        ),
    ],
)
def test_training_and_sampling_at_different_rope_scales_warns(
    clips: Workspace, capsys: Capture, change: dict[str, Any], message: str
) -> None:
    clips.write_config(**change)

    assert message in warnings(clips, capsys)


@pytest.mark.parametrize(
    "change",
    [
        # 80x48 and 128x128 have one scale, the one outside 480..854.
        {},
        {"validation_resolution": "768x512", "rope_scale": "1,2,2"},
    ],
)
def test_training_and_sampling_at_the_same_rope_scale_does_not_warn(
    clips: Workspace, capsys: Capture, change: dict[str, Any]
) -> None:
    clips.write_config(**change)

    assert "scale" not in warnings(clips, capsys)


def test_a_motion_score_has_no_effect(clips: Workspace, capsys: Capture) -> None:
    clips.write_datasets([{**CLIPS, "sana_motion_score": 30}, DATASETS[1]])

    expected = "pictures.sana_motion_score: has no effect: Kandinsky 5 Video does not use it"
    assert expected in warnings(clips, capsys)


@pytest.fixture
def block_sparse(tmp_path: Path) -> Workspace:
    """Clips of 128 x 128, which block-sparse attention can divide into tiles."""
    checkpoint = make_checkpoint(tmp_path / "nabla", "t2v", nabla=True)
    workspace = make_clip_workspace(tmp_path / "run", checkpoint, "t2v-lite-sft-10s")
    square_clips = {**CLIPS, "resolution": 128, "crop": True, "crop_style": "center"}
    workspace.write_datasets([square_clips, DATASETS[1]])
    return workspace


def test_block_sparse_attention_plans_with_measured_densities(
    block_sparse: Workspace, capsys: Capture
) -> None:
    plan_for_a_gpu = ("--dry-run", "--verbose", "--device-memory=80")
    assert block_sparse.train(*plan_for_a_gpu) == 0
    assumed = "attention density (share of the tiles visited): 25 % at 128x128@5 (assumed)"
    assert assumed in capsys.readouterr().out

    assert block_sparse.train("max_train_steps=1") == 0
    density = block_sparse.metrics()[0]["attention_density"]
    assert f", attention density {density * 100:.0f} %" in capsys.readouterr().out
    # The run was on the CPU: the record of a GPU is written by hand. The tokens of a clip are two
    # latent frames of 8 x 8.
    measured = {"densities": {2 * 8 * 8: density}}
    runs = {"kandinsky5-video t2v-lite-sft-10s, lora, 128x128@5": measured}
    block_sparse.path("cache").mkdir(exist_ok=True)
    block_sparse.path("cache/outcomes.json").write_text(json.dumps({"a GPU with 80 GiB": runs}))

    assert block_sparse.train(*plan_for_a_gpu) == 0

    assert f"{density * 100:.0f} % at 128x128@5 (measured)" in capsys.readouterr().out


@pytest.mark.parametrize("attention", ["dense", "nabla"])
def test_the_trained_attention_is_that_of_previews_samples_and_the_readme(
    block_sparse: Workspace, attention: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    types: list[tuple[str, str]] = []
    attend = Kandinsky5Transformer3DModel.forward

    def noted(self: Any, *inputs: Any, sparse_params: Any = None, **named: Any) -> Any:
        when = "training" if torch.is_grad_enabled() else "sampling"
        types.append((when, "dense" if sparse_params is None else "nabla"))
        return attend(self, *inputs, sparse_params=sparse_params, **named)

    monkeypatch.setattr(Kandinsky5Transformer3DModel, "forward", noted)
    block_sparse.write_config(
        attention_type=attention,
        max_train_steps=1,
        validation_disable=False,
        disable_benchmark=True,
        validation_num_video_frames=5,
    )

    assert block_sparse.train() == 0
    assert block_sparse.run("sample", "output", "--prompt", "a red square") == 0

    assert set(types) == {("training", attention), ("sampling", attention)}
    assert ("attention_density" in block_sparse.metrics()[0]) is (attention == "nabla")
    readme = block_sparse.path("output/model_card/README.md").read_text(encoding="utf-8")
    written = {"dense": "regular", "nabla": "nabla"}[attention]
    assert f'pipe.transformer.register_to_config(attention_type="{written}")' in readme
    other = warnings(block_sparse, capsys, "attention_type=auto", "max_train_steps=2")
    assert f"attention_type: output/checkpoint-1 was trained with {attention}, not auto" in other


def test_an_earlier_run_that_continues_with_another_attention_says_so(
    block_sparse: Workspace, capsys: Capture
) -> None:
    """Its checkpoints do not record `attention_type`, since there was none."""
    assert block_sparse.train("max_train_steps=1") == 0
    manifest = block_sparse.path("output/checkpoint-1/manifest.json")
    content = json.loads(manifest.read_text())
    del content["identity"]["settings"]["attention_type"]
    manifest.write_text(json.dumps(content))

    same = warnings(block_sparse, capsys, "max_train_steps=2")
    changed = warnings(block_sparse, capsys, "max_train_steps=2", "attention_type=dense")

    assert "attention_type" not in same
    assert "attention_type: output/checkpoint-1 was trained with auto, not dense" in changed


def test_a_full_fine_tune_with_dense_attention_is_a_pipeline_with_it(
    block_sparse: Workspace,
) -> None:
    settings = ("model_type=full", "learning_rate=1e-4", "max_train_steps=1")

    assert block_sparse.train(*settings, "attention_type=dense") == 0

    config = json.loads(block_sparse.path("output/pipeline/transformer/config.json").read_text())
    assert config["attention_type"] == "regular"


@pytest.mark.parametrize(
    ("setting", "attention"),
    [
        ("auto", "block-sparse (NABLA), as the diffusers pipeline samples"),
        ("dense", "dense, by attention_type"),
    ],
)
def test_the_plan_names_the_attention(
    block_sparse: Workspace, setting: str, attention: str, capsys: Capture
) -> None:
    assert block_sparse.run("plan", f"attention_type={setting}") == 0

    assert f"attention  {attention}" in capsys.readouterr().out


def test_nabla_is_refused_for_a_checkpoint_without_its_settings(
    clips: Workspace, capsys: Capture
) -> None:
    assert clips.run("plan", "attention_type=nabla") == 2

    assert "has no settings of it (attention_P, " in capsys.readouterr().err


def test_dense_attention_needs_no_whole_tiles(block_sparse: Workspace) -> None:
    block_sparse.write_datasets([{**CLIPS, "aspect_bucket_alignment": "16"}, DATASETS[1]])

    assert block_sparse.run("plan", "attention_type=dense") == 0


def test_block_sparse_attention_refuses_sizes_without_whole_tiles(
    block_sparse: Workspace, capsys: Capture
) -> None:
    block_sparse.write_datasets([{**CLIPS, "aspect_bucket_alignment": "16"}, DATASETS[1]])

    assert block_sparse.train("--dry-run") == 2

    assert "128" in capsys.readouterr().err
