"""Whole runs on quantised bases, and captions from quantised encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, Kandinsky5T2IPipeline, SanaVideoPipeline
from PIL import Image
from safetensors.torch import load_file

from simpletuner.caching.entry import list_keys
from simpletuner.config.precision import Quantisation
from simpletuner.encoding.read import CacheStore
from simpletuner.memory.quantisation.formats import Packed
from simpletuner.memory.quantisation.layers import pack
from simpletuner.models.kandinsky5.loading import load_processor
from tests.tools.runs import LORA, SANA_RUN, STATEFUL_RUN, assert_same_run, make_clip_workspace
from tests.tools.tiny import make_checkpoint
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow(4)

INT8: dict[str, Any] = {"base_model_precision": "int8-quanto", "mixed_precision": "bf16"}
# Layers of a tiny transformer: two visual blocks with 10 each, one text block with 6.
LAYERS = 2 * 10 + 1 * 6


def assert_trained(workspace: Workspace) -> None:
    """The losses are finite and the LoRA is not the one that training starts from."""
    assert "nan" not in str(workspace.metrics()).lower()
    weights = load_file(workspace.path(LORA))
    assert any(weights[name].any() for name in weights if name.endswith("lora_B.weight"))


def assert_loads(pipeline: DiffusionPipeline, workspace: Workspace) -> None:
    pipeline.load_lora_weights(workspace.path("output"))
    assert pipeline.get_active_adapters()


def assert_is_not_plain(preview: Path) -> None:
    """A preview with NaN in it would have one colour; a picture has at most 2^14 pixels here."""
    colours = Image.open(preview).getcolors(2**14)
    assert colours is None or len(colours) > 1


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True, "quantize_via": "accelerator", "lora_alpha": 4},
    ],
)
def test_a_quantised_model_trains_a_lora_for_the_stock_pipeline(
    tmp_path: Path, t2i_checkpoint: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight is packed once, not again for previews, for the average or for the file."""
    packed: list[torch.Size] = []

    def count_and_pack(weight: torch.Tensor, quantisation: Quantisation) -> Packed:
        packed.append(weight.shape)
        return pack(weight, quantisation)

    monkeypatch.setattr("simpletuner.memory.quantisation.layers.pack", count_and_pack)
    workspace = Workspace.create(
        tmp_path / "run",
        t2i_checkpoint,
        pictures=4,
        use_ema=True,
        validation_disable=False,
        **INT8,
        **settings,
    )

    assert workspace.train() == 0

    assert_trained(workspace)
    previews = workspace.path("output/validation_images")
    assert_is_not_plain(previews / "step_4_validation_0_128x128.png")
    assert_is_not_plain(previews / "step_4_validation_0_128x128_ema.png")
    processor = load_processor(t2i_checkpoint)
    pipeline = Kandinsky5T2IPipeline.from_pretrained(t2i_checkpoint, tokenizer=processor)
    assert_loads(pipeline, workspace)
    assert len(packed) == LAYERS


def test_a_changed_base_precision_is_reported(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.write_config(**INT8)
    assert workspace.train() == 0
    capsys.readouterr()

    assert workspace.run("plan", "base_model_precision=int8") == 0
    same_format = capsys.readouterr().out
    assert workspace.run("plan", "base_model_precision=no_change") == 0
    not_quantised = capsys.readouterr().out
    assert workspace.run("plan", "quantized_matmul=true") == 0
    quantised_products = capsys.readouterr().out

    assert "no longer quite the same" not in same_format, "int8 means int8-quanto"
    assert "'no_change': checkpoint-4 was trained with 'int8-quanto'" in not_quantised
    change = "was trained with false, not true; the new value applies from here on"
    assert change in quantised_products


def test_a_quantised_clip_model_trains(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "t2v", "t2v")
    workspace = make_clip_workspace(tmp_path / "run", checkpoint, "t2v-lite-sft-5s")
    workspace.write_config(**INT8)

    assert workspace.train() == 0

    assert_trained(workspace)


def test_a_quantised_sana_model_trains_a_lora_for_the_stock_pipeline(
    tmp_path: Path, sana_checkpoint: Path
) -> None:
    workspace = Workspace.create(
        tmp_path / "run",
        sana_checkpoint,
        pictures=4,
        **SANA_RUN,
        mixed_precision="bf16",
        base_model_precision="fp8",
        quantized_matmul=True,
        text_encoder_1_precision="int8",
        validation_disable=False,
        validation_num_video_frames=5,
    )

    assert workspace.train() == 0

    assert_trained(workspace)
    assert_loads(SanaVideoPipeline.from_pretrained(sana_checkpoint), workspace)


def test_an_interrupted_quantised_run_continues_bit_exactly(
    tmp_path: Path, t2i_checkpoint: Path
) -> None:
    settings = {
        **STATEFUL_RUN,
        "mixed_precision": "bf16",
        "base_model_precision": "int8",
        "quantized_matmul": True,
        "use_dora": True,
    }
    straight = Workspace.create(tmp_path / "straight", t2i_checkpoint, **settings)
    assert straight.train() == 0
    stopped = straight.stopped(tmp_path / "stopped", 3)

    assert stopped.train() == 0

    assert_same_run(straight, stopped)


def cached_captions(workspace: Workspace) -> dict[str, torch.Tensor]:
    """Cached embeddings by their key."""
    store = CacheStore(workspace.path("cache/text"))
    return {key: store.read(key)["prompt_embeds"] for key in list_keys(store.folder)}


def relative_distance(embeds: torch.Tensor, reference: torch.Tensor) -> float:
    return ((embeds - reference).norm() / reference.norm()).item()


def test_captions_of_a_quantised_encoder_are_cached_separately(workspace: Workspace) -> None:
    """They are near those of the plain encoder, under other keys."""
    workspace.write_config(validation_disable=False, validation_disable_unconditional=False)
    assert workspace.run("cache", "fill") == 0
    plain = cached_captions(workspace)
    assert plain

    assert workspace.run("cache", "fill", "text_encoder_1_precision=int8") == 0
    with_int8 = cached_captions(workspace)
    assert workspace.run("cache", "fill", "text_encoder_1_precision=int8-quanto") == 0
    with_full_name = cached_captions(workspace)
    assert workspace.run("cache", "fill", "text_encoder_2_precision=int8") == 0
    with_second_encoder = cached_captions(workspace)

    assert len(with_int8) == 2 * len(plain)
    assert with_full_name.keys() == with_int8.keys(), "int8 means int8-quanto"
    assert len(with_second_encoder) == 3 * len(plain)
    for key in with_int8.keys() - plain.keys():
        embeds = with_int8[key]
        same_shape = [reference for reference in plain.values() if reference.shape == embeds.shape]
        nearest = min(relative_distance(embeds, reference) for reference in same_shape)
        assert 1e-4 < nearest < 0.2
