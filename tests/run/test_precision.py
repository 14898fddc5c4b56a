"""Whole runs on quantised bases, and captions from quantised encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Kandinsky5T2IPipeline, SanaVideoPipeline
from PIL import Image
from safetensors.torch import load_file

from simpletuner.caching.entry import list_keys
from simpletuner.config.precision import Quantisation
from simpletuner.encoding.read import CacheStore
from simpletuner.memory.quantisation.formats import Packed
from simpletuner.memory.quantisation.layers import pack
from simpletuner.models.kandinsky5.loading import load_processor
from tests.tools.runs import STATEFUL_RUN, assert_same_run, make_clip_workspace
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow(4)

INT8 = {
    "base_model_precision": "int8-quanto",
    "mixed_precision": "bf16",
    "validation_disable": False,
}


def lora_of(workspace: Workspace) -> dict[str, torch.Tensor]:
    return load_file(workspace.path("output/pytorch_lora_weights.safetensors"))


@pytest.mark.parametrize(
    "settings", [{}, {"use_dora": True, "quantize_via": "accelerator", "lora_alpha": 4}]
)
def test_a_quantised_model_trains_a_lora_for_the_stock_pipeline(
    tmp_path: Path, t2i_checkpoint: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trains, previews with the stock pipeline, and writes a file that the stock pipeline loads.
    Each weight is packed once, not again for previews, for the moving average or for the file."""
    shapes: list[torch.Size] = []

    def count(weight: torch.Tensor, quantisation: Quantisation) -> Packed:
        shapes.append(weight.shape)
        return pack(weight, quantisation)

    monkeypatch.setattr("simpletuner.memory.quantisation.layers.pack", count)
    workspace = Workspace.create(
        tmp_path / "run", t2i_checkpoint, pictures=4, use_ema=True, **INT8, **settings
    )
    assert workspace.train() == 0
    assert "nan" not in str(workspace.metrics()).lower()
    assert any(
        name.endswith("lora_B.weight") and tensor.any()
        for name, tensor in lora_of(workspace).items()
    )
    for name in ("step_4_validation_0_128x128.png", "step_4_validation_0_128x128_ema.png"):
        assert (
            len(
                Image.open(workspace.path(f"output/validation_images/{name}")).getcolors(2**14)
                or "many"
            )
            > 1
        )
    pipeline = Kandinsky5T2IPipeline.from_pretrained(
        t2i_checkpoint, tokenizer=load_processor(t2i_checkpoint)
    )
    pipeline.load_lora_weights(workspace.path("output"))
    assert pipeline.get_active_adapters()
    assert len(shapes) == 1 * 6 + 2 * 10, "a text block has 6 layers, a visual one 10"


def test_a_changed_base_precision_is_reported(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_config(**INT8 | {"validation_disable": True})
    assert workspace.train() == 0
    capsys.readouterr()
    assert workspace.run("plan", "base_model_precision=int8") == 0
    assert "no longer quite the same" not in capsys.readouterr().out, "int8 means int8-quanto"
    assert workspace.run("plan", "base_model_precision=no_change") == 0
    assert "'no_change': checkpoint-4 was trained with 'int8-quanto'" in capsys.readouterr().out
    assert workspace.run("plan", "quantized_matmul=true") == 0
    assert (
        "was trained with false, not true; the new value applies from here on"
        in capsys.readouterr().out
    )


def test_a_quantised_clip_model_trains(tmp_path: Path) -> None:
    workspace = make_clip_workspace(
        tmp_path / "run", make_checkpoint(tmp_path / "t2v", "t2v"), "t2v-lite-sft-5s"
    )
    workspace.write_config(**INT8 | {"validation_disable": True})
    assert workspace.train() == 0
    assert "nan" not in str(workspace.metrics()).lower()
    assert lora_of(workspace)


def test_a_quantised_sana_model_trains_a_lora_for_the_stock_pipeline(
    tmp_path: Path, sana_checkpoint: Path
) -> None:
    settings = {
        "model_family": "sanavideo",
        "model_flavour": "2b-480p",
        "validation_num_video_frames": 5,
    }
    settings |= {
        "base_model_precision": "fp8",
        "quantized_matmul": True,
        "text_encoder_1_precision": "int8",
    }
    workspace = Workspace.create(tmp_path / "run", sana_checkpoint, pictures=4, **INT8 | settings)
    assert workspace.train() == 0
    assert "nan" not in str(workspace.metrics()).lower()
    pipeline = SanaVideoPipeline.from_pretrained(sana_checkpoint)
    pipeline.load_lora_weights(workspace.path("output"))
    assert pipeline.get_active_adapters()


def test_an_interrupted_quantised_run_continues_bit_exactly(
    tmp_path: Path, t2i_checkpoint: Path
) -> None:
    base = {
        "base_model_precision": "int8",
        "quantized_matmul": True,
        "use_dora": True,
        "lora_dropout": 0.1,
    }
    settings = {**STATEFUL_RUN, "mixed_precision": "bf16", **base}
    straight = Workspace.create(tmp_path / "straight", t2i_checkpoint, **settings)
    assert straight.train() == 0
    broken = straight.stopped(tmp_path / "broken", 3)
    assert broken.train() == 0
    assert_same_run(straight, broken)


def captions_of(workspace: Workspace) -> dict[str, dict[str, torch.Tensor]]:
    """Cached embeddings by their key."""
    store = CacheStore(workspace.path("cache/text"))
    return {key: store.read(key) for key in [*list_keys(store.folder)]}


def test_captions_of_a_quantised_encoder_are_cached_separately(workspace: Workspace) -> None:
    """Near the plain ones, under other keys; a bare name means the same entries as the full one."""
    workspace.write_config(validation_disable=False, validation_disable_unconditional=False)
    assert workspace.run("cache", "fill") == 0
    plain = captions_of(workspace)
    assert plain
    assert workspace.run("cache", "fill", "text_encoder_1_precision=int8") == 0
    both = captions_of(workspace)
    assert len(both) == 2 * len(plain)
    assert workspace.run("cache", "fill", "text_encoder_1_precision=int8-quanto") == 0
    assert captions_of(workspace).keys() == both.keys()
    assert workspace.run("cache", "fill", "text_encoder_2_precision=int8") == 0
    assert len(captions_of(workspace)) == 3 * len(plain)
    quantised = [both[name] for name in both.keys() - plain.keys()]
    for one in quantised:
        distances = [
            (
                (one["prompt_embeds"] - other["prompt_embeds"]).norm()
                / other["prompt_embeds"].norm()
            ).item()
            for other in plain.values()
            if other["prompt_embeds"].shape == one["prompt_embeds"].shape
        ]
        assert 1e-4 < min(distances) < 0.2
