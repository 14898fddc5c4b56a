"""The teacher of CREPA: real tiny DINOv2 models on decoded clips, cached, resumed, refused."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
)

from simpletuner.config.techniques.crepa import CrepaConfig
from simpletuner.models.kandinsky5.video import HunyuanLatentEncoder
from simpletuner.models.vision import ENCODERS, VisionEncoder
from simpletuner.techniques import crepa, teacher
from simpletuner.techniques.teacher import FrameTeacher, rename_weights
from tests.tools.families import CPU
from tests.tools.refusals import complaint, complaints, warnings
from tests.tools.runs import assert_same_run, make_clip_workspace
from tests.tools.tiny import build_video_vae, make_checkpoint
from tests.tools.workspace import Workspace

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "mlp_ratio": 2,
    "image_size": 56,
}
SIDE = 70


def settings_of(encoder: Path, **more: Any) -> dict[str, Any]:
    """A run of CREPA on the tiny model, which is steady in length and has a checkpoint in its
    middle.
    """
    steady = {"max_train_steps": 6, "checkpoint_step_interval": 3, "lr_scheduler": "constant"}
    own = {"crepa_enabled": True, "crepa_block_index": 0, "crepa_encoder_image_size": SIDE}
    return {**steady, **own, "crepa_encoder": str(encoder), **more}


@pytest.fixture(
    scope="module", params=[Dinov2Model, Dinov2WithRegistersModel], ids=["plain", "registers"]
)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return request.param(request.param.config_class(**SMALL, patch_size=14)).eval()


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    Dinov2Model(Dinov2Config(**SMALL, patch_size=14)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def t2v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("t2v"), "t2v")


def make_teacher(model: Any, **settings: Any) -> FrameTeacher:
    config = CrepaConfig.model_validate({"crepa_encoder_image_size": SIDE, **settings})
    decoder = HunyuanLatentEncoder(build_video_vae().eval(), CPU, torch.float32)
    return FrameTeacher(model, decoder, config, 2)


def test_the_teacher_sees_the_pixel_frames_at_latent_frames(model: Any) -> None:
    """Its features equal those of the model on frames 0, 4 and 8, cut to the same patches."""
    frame_teacher = make_teacher(model, crepa_encoder_frames_batch_size=2)
    latents = torch.randn(16, 3, 12, 8)
    mean = torch.tensor(teacher.MEAN).view(3, 1, 1)
    deviation = torch.tensor(teacher.DEVIATION).view(3, 1, 1)

    features = frame_teacher.encode(latents)
    with torch.no_grad():
        pixels = frame_teacher.decoder.decode(latents[None])[0]  # 3 9 96 64
        pictures = torch.nn.functional.interpolate(
            pixels[:, [0, 4, 8]].transpose(0, 1) / 2 + 0.5,
            (6 * 14, 4 * 14),  # 6 x 4 patches of 14 pixels
            mode="bilinear",
            antialias=True,
        )
        tokens = model((pictures - mean) / deviation).last_hidden_state[:, -24:]

    assert features.shape == (3, 6, 4, 32)
    assert features.dtype == torch.bfloat16
    assert torch.allclose(features.float(), tokens.unflatten(1, (6, 4)), atol=0.03)


@pytest.mark.parametrize(("height", "width"), [(768, 512), (480, 832), (512, 512), (64, 2048)])
def test_patches_keep_the_proportions_of_a_clip(height: int, width: int) -> None:
    rows, columns = CrepaConfig().patches(height, width)

    assert rows * columns <= 37 * 37
    assert rows * columns > 0.8 * 37 * 37
    assert rows / columns == pytest.approx(
        height / width, rel=0.2 if min(rows, columns) < 10 else 0.03
    )


@pytest.mark.parametrize("size", [(12, 8), (9, 16), (6, 6)])
def test_features_are_resampled_in_two_dimensions(model: Any, size: tuple[int, int]) -> None:
    """Features that are coordinates end up at their positions, whatever the encoder's grid is."""
    own = make_teacher(model)
    rows, columns = torch.meshgrid(
        torch.linspace(0.1, 0.9, 5), torch.linspace(0.1, 0.9, 5), indexing="ij"
    )
    own._features = lambda frames: torch.stack([rows, columns]).expand(len(frames), -1, -1, -1)
    actual = own.encode(torch.randn(16, 1, 2 * size[0], 2 * size[1]))[0].float()
    for axis, count in enumerate(size):
        expected = ((torch.arange(count) + 0.5) / count).clamp(0.1, 0.9)
        mean = actual[..., axis].mean(1 - axis)
        assert torch.allclose(mean, expected, atol=0.05)
        assert float(actual[..., axis].std(1 - axis).max()) < 0.01


def torch_hub_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """DINOv2's weights from transformers' to torch hub's names, with one matrix for q, k and v."""
    pairs = (
        ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
        ("embeddings.position_embeddings", "pos_embed"),
        ("embeddings.", ""),
        ("encoder.layer.", "blocks."),
        ("attention.o_proj", "attn.proj"),
        ("layer_scale1.lambda1", "ls1.gamma"),
        ("layer_scale2.lambda1", "ls2.gamma"),
        ("layernorm.", "norm."),
        ("mlp.down_proj", "mlp.w3"),
    )
    results: dict[str, Tensor] = {}
    for name, weight in weights.items():
        for in_transformers, in_torch_hub in pairs:
            name = name.replace(in_transformers, in_torch_hub)
        results[name] = weight
    for parts, whole in (
        (("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attn.qkv"),
        (("mlp.gate_proj", "mlp.up_proj"), "mlp.w12"),
    ):
        for name in [name for name in results if parts[0] in name]:
            results[name.replace(parts[0], whole)] = torch.cat(
                [results.pop(name.replace(parts[0], part)) for part in parts]
            )
    return results


@pytest.mark.parametrize("gated", [False, True])
def test_weights_of_torch_hub_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gated: bool
) -> None:
    config = Dinov2WithRegistersConfig(**SMALL, patch_size=14, use_swiglu_ffn=gated)
    original = Dinov2WithRegistersModel(config).eval()
    for parameter in original.parameters():
        torch.nn.init.normal_(parameter)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub/checkpoints/dinov2_vits14_reg4_pretrain.pth"
    file.parent.mkdir(parents=True)
    torch.save(torch_hub_names(original.state_dict()), file)
    named = VisionEncoder("dino_v2_s_reg", "crepa_encoder")

    assert named.local() == file

    monkeypatch.setattr(VisionEncoder, "settings", lambda self: config.to_dict())
    loaded = teacher._load_model(named, torch.float32).eval()
    pictures = torch.randn(1, 3, 42, 70)
    with torch.no_grad():
        expected = original(pictures).last_hidden_state
        features = loaded(pictures).last_hidden_state

    assert torch.equal(features, expected)
    assert rename_weights({"mask_token": pictures}).keys() == {"embeddings.mask_token"}


@pytest.mark.slow(4)
def test_a_run_computes_each_clip_once_and_resumes_exactly(
    tmp_path: Path,
    t2v: Path,
    encoder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = {"decode": 0, "load": 0}

    def counted(name: str, call: Any) -> Any:
        def count(*inputs: Any, **more: Any) -> Any:
            calls[name] += 1
            return call(*inputs, **more)

        return count

    monkeypatch.setattr(
        HunyuanLatentEncoder, "decode", counted("decode", HunyuanLatentEncoder.decode)
    )
    monkeypatch.setattr(crepa, "load_teacher", counted("load", crepa.load_teacher))
    runs = [
        make_clip_workspace(tmp_path / name, t2v, "t2v-lite-sft-5s")
        for name in ("straight", "live")
    ]
    for run in runs:
        run.write_config(**settings_of(encoder, crepa_similarity_threshold=0.9))
    runs[1].write_config(crepa_cache="off", crepa_drop_vae_encoder=True)
    assert runs[0].run("plan") == 0
    message = capsys.readouterr().out
    assert "Cache of features: 0 of 3 exist, 3 to encode" in message
    assert "features up to" in message
    assert runs[0].train() == 0
    assert calls == {"decode": 3, "load": 1}, "once a clip, before the first step"

    broken = runs[0].stopped(tmp_path / "broken", 3)
    calls.update(decode=0, load=0)
    assert broken.train() == 0
    assert calls == {"decode": 0, "load": 0}, "cached"
    assert_same_run(runs[0], broken)
    assert runs[1].train() == 0
    assert calls == {"decode": 6, "load": 1}, "in every step"

    mine = runs[0].metrics()
    live = runs[1].metrics()

    assert [metrics["crepa_alignment_score"] for metrics in mine] == pytest.approx(
        [metrics["crepa_alignment_score"] for metrics in live], abs=1e-4
    )
    assert mine[-1]["crepa_alignment_score_ema"] != mine[-1]["crepa_alignment_score"]

    names = load_file(runs[0].path("output/pytorch_lora_weights.safetensors")).keys()
    assert all("lora" in name for name in names)

    saved = runs[0].path("output/checkpoint-6/training_state/Crepa.module.safetensors")
    assert {tuple(tensor.shape) for tensor in load_file(saved).values()} == {(32,), (32, 32)}


@pytest.mark.slow(1)
def test_another_encoder_or_size_has_other_features(
    tmp_path: Path, t2v: Path, encoder: Path
) -> None:
    run = make_clip_workspace(tmp_path / "run", t2v, "t2v-lite-sft-5s")
    run.write_config(**settings_of(encoder))
    counts: list[Any] = []
    for more in ((), ("crepa_encoder_image_size=84",), ("crepa_lambda=0.1",)):
        assert (
            run.run("cache", "fill", f"output_dir=run{len(counts)}", "cache_dir=cache", *more) == 0
        )
        counts.append(len(list(run.path("cache").rglob("*.zst"))))

    assert [after - before for before, after in itertools.pairwise(counts)] == [3, 0]


def test_pictures_are_refused_for_lack_of_frames(
    workspace: Workspace, encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_config(**settings_of(encoder, max_train_steps=2))
    assert complaint(workspace, capsys) == (
        "crepa_enabled: aligns the frames of clips, but Kandinsky 5 Image makes pictures."
    )


def test_sana_video_trains_with_a_teacher(
    tmp_path: Path, sana_checkpoint: Path, encoder: Path
) -> None:
    run = make_clip_workspace(tmp_path / "run", sana_checkpoint, "2b-480p")
    run.write_config(model_family="sanavideo", **settings_of(encoder, max_train_steps=1))
    assert run.train() == 0
    assert abs(run.metrics()[0]["crepa_alignment_score"]) <= 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"crepa_block_index": 2},
        "crepa_block_index: 2 is out of range: the model has 2 blocks, 0 to 1.",
    ),
    (
        {"crepa_feature_source": "backbone"},
        "crepa_teacher_block_index: is not set: a block cannot be its own teacher",
    ),
    (
        {"crepa_feature_source": "backbone", "crepa_teacher_block_index": 0},
        "crepa_teacher_block_index: 0 is crepa_block_index, too: a block cannot be its own teacher",
    ),
    (
        {"crepa_use_backbone_features": True, "crepa_teacher_block_index": 5},
        "crepa_teacher_block_index: 5 is out of range",
    ),
    (
        {
            "crepa_feature_source": "encoder",
            "crepa_use_backbone_features": True,
            "crepa_teacher_block_index": 1,
        },
        "crepa_feature_source: 'encoder' contradicts crepa_use_backbone_features true",
    ),
    (
        {"crepa_encoder": "dinov2_vitx14"},
        "crepa_encoder: 'dinov2_vitx14' is neither one of dinov2_vits14,",
    ),
    (
        {"crepa_encoder_image_size": 500},
        "crepa_encoder_image_size: 500 is not a multiple of 14; the nearest are 490",
    ),
    (
        {"crepa_feature_source": "self_flow"},
        "crepa_feature_source: 'self_flow' is not available: it needs a moving",
    ),
    ({"crepa_self_flow": True}, "crepa_self_flow: is not a key here: Self-Flow is not supported"),
    ({"crepa_use_tae": True}, "crepa_use_tae: is not a key here: no tiny autoencoder decodes"),
    (
        {"vae_cache_ondemand": True},
        "crepa_cache: 'auto' needs latents that are cached before training; with vae",
    ),
    (
        {"vae_cache_ondemand": True, "crepa_cache": "off", "crepa_drop_vae_encoder": True},
        "crepa_drop_vae_encoder: with vae_cache_ondemand pictures is encoded during training",
    ),
]


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory, t2v: Path, encoder: Path) -> Workspace:
    run = make_clip_workspace(tmp_path_factory.mktemp("refused") / "run", t2v, "t2v-lite-sft-5s")
    run.write_config(**settings_of(encoder))
    return run


@pytest.mark.parametrize(
    ("settings", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_unsuitable_settings_are_refused(
    clips: Workspace, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], told: str
) -> None:
    path = clips.path("config/config.json")
    before = path.read_text()
    clips.write_config(**settings)
    try:
        assert any(problem.startswith(told) for problem in complaints(clips, capsys))
    finally:
        path.write_text(before)


def test_an_unavailable_encoder_is_reported(
    clips: Workspace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    message = complaint(clips, capsys, "plan", "crepa_encoder=dinov2_vits14")

    assert message.startswith(
        "crepa_encoder: 'dinov2_vits14' (facebook/dinov2-small) is neither in '"
    )
    assert "dinov2_vits14_pretrain.pth" in message

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip", "patch_size": 32}))
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    message = complaint(clips, capsys, "plan", f"crepa_encoder={tmp_path}")

    assert message.endswith("is a 'clip' with patches of 32 px, not a DINOv2 with 14.")


def test_auto_caches_only_if_the_disk_has_room(
    clips: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simpletuner.annexes.fitting.ready.FEATURE_SHARE", 0.0)
    capsys.readouterr()
    assert clips.run("plan") == 0
    message = capsys.readouterr().out
    assert re.search(r"chosen by crepa_cache auto\)\n +crepa_cache +off\n", message)
    assert "Cache of features" not in message
    assert "encoding features" not in message


def test_settings_of_a_disabled_crepa_cause_warnings(
    clips: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    message = warnings(clips, capsys, "crepa_enabled=false")

    assert "crepa_encoder: has no effect without crepa_enabled." in message

    message = warnings(clips, capsys, "crepa_teacher_block_index=1")
    assert "crepa_teacher_block_index: has no effect: no block teaches" in message


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("dinov2_vitb14", "dinov2_vitb14"),
        ("dinov2_vitl14_reg", "dinov2_vitl14_reg"),
        ("dino_v2_g", "dinov2_vitg14"),
        ("dinov2_g", "dinov2_vitg14"),
        ("dinov2-vitg14", "dinov2_vitg14"),
        ("dino_v2_s", "dinov2_vits14"),
        ("dinov2_s", "dinov2_vits14"),
        ("dinov2-vitb14", "dinov2_vitb14"),
        ("dinov3_s", None),
    ],
)
def test_encoders_are_found_by_all_their_spellings(spelling: str, name: str | None) -> None:
    assert VisionEncoder(spelling, "crepa_encoder").known == name
    assert name is None or name in ENCODERS
