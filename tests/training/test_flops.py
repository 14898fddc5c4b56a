"""Counted FLOPs against torch's counter on the real classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import variants
from benchmarks.models import SHAPES, hollow_transformer, lora_targets
from benchmarks.variants import Variant
from simpletuner.config.techniques.tread import Route
from simpletuner.models.kandinsky5 import nabla
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.techniques.tread import TreadSpec
from simpletuner.reporting.step_figures import row_of
from simpletuner.techniques.tread import Tread
from simpletuner.training import step
from simpletuner.training.lora import LoraAdapter
from simpletuner.training.losses import Losses
from simpletuner.training.meter import batch_work, count_flops
from tests.speed import test_speed as speed
from tests.tools.tiny import make_checkpoint
from tests.training.test_step import Batches


@pytest.mark.parametrize(
    ("size", "routes"),
    [
        ("tiny", []),
        ("tiny-video", []),
        ("tiny-sana", []),
        ("tiny", [Route(0.5, 1, -1)]),
        ("tiny-video", [Route(0.7, 0, 0)]),
    ],
)
def test_counted_flops_equal_those_of_torchs_counter(size: str, routes: list[Route]) -> None:
    techniques = [Tread(TreadSpec(routes))] if routes else []
    variant = Variant(
        size, "cpu", {"gradient_checkpointing": False, "speed": "reference"}, techniques
    )
    assembly = variant.assembly
    assert assembly.sample_flops is not None
    batch = variant.loader.batch
    # The meter does not know the CPU's own attention kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as meter:
        step.run_micro_step(assembly, batch, 0, 0, Losses())
    message = assembly.sample_flops(SHAPES[size].tokens, SHAPES[size].caption)

    assert message.total == pytest.approx(meter.get_total_flops(), rel=1e-6)
    assert batch_work(batch, assembly.adapter.spec, assembly.sample_flops) == message


KANDINSKY = FAMILIES["kandinsky5-image"].lora_presets
SANA = FAMILIES["sanavideo"].lora_presets


@pytest.mark.parametrize(
    ("size", "targets", "unread"),
    [
        ("tiny", KANDINSKY["all-linear"], 0),
        ("tiny", KANDINSKY["slider"], 2),
        ("tiny", r"visual_transformer_blocks\.1\.self_attention\.to_(query|key|value)", 1),
        ("tiny-sana", SANA["all-linear"], 0),
        ("tiny-sana", SANA["slider"], 2),
        ("tiny-sana", r"transformer_blocks\.1\.attn1\.to_[qkv]", 1),
    ],
)
def test_flops_below_the_first_trained_block_are_not_counted(
    size: str, targets: str, unread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`unread`: blocks in which no gradient of the text's keys and values is read.

    Plain products leave these two gradients out; the kernels of a GPU compute them.
    """
    monkeypatch.setattr(variants, "lora_targets", lambda size: targets)
    settings = {"gradient_checkpointing": False, "speed": "reference"}
    variant = Variant(size, "cpu", settings)
    assembly = variant.assembly
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as meter:
        step.run_micro_step(assembly, variant.loader.batch, 0, 0, Losses())

    tokens = SHAPES[size].tokens
    text = SHAPES[size].caption
    width = assembly.adapter.block_layout(assembly.transformer).width
    left_out = unread * 2 * (2 * tokens * text * width)
    assert assembly.sample_flops is not None
    counted = assembly.sample_flops(tokens, text).total
    assert counted == pytest.approx(meter.get_total_flops() + left_out, rel=1e-6)


@pytest.mark.parametrize(
    ("size", "teraflops"), [("lite", 563), ("image", 106), ("pro", 9417), ("sana", 246)]
)
def test_flops_of_real_models(size: str, teraflops: float) -> None:
    """Measured once on the real architectures, with a LoRA on queries, keys and values."""
    from peft import LoraConfig

    model: Any = hollow_transformer(size)
    targets = ["to_q", "to_k", "to_v"] if size == "sana" else lora_targets(size)
    with torch.device("meta"):
        model.add_adapter(settings := LoraConfig(r=16, target_modules=targets))
    flops = count_flops(
        model, FAMILIES[SHAPES[size].family].cost, LoraAdapter(model, settings).adapters, []
    )

    assert flops(SHAPES[size].tokens, SHAPES[size].caption).total / 1e12 == pytest.approx(
        teraflops, rel=0.03
    )


def test_tokens_that_skip_blocks_are_not_counted() -> None:
    message = {
        ratio: Variant("tiny", "cpu", {}, [Tread(TreadSpec([Route(ratio, 0, -1)]))]).step().flops
        for ratio in (0.0, 0.5)
    }

    assert message[0.0] == Variant("tiny", "cpu", {}).step().flops

    assert message[0.0] is not None
    assert message[0.5] is not None

    assert message[0.5] < 0.7 * message[0.0]


def test_tiles_that_block_sparse_attention_skips_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only passes with gradients count, of all blocks and micro-steps, read in one transfer."""
    checkpoint = make_checkpoint(tmp_path, "t2v", nabla=True)
    tiles = nabla.tile_mask
    chosen: list[Tensor] = []

    def choose(*given: Any) -> Tensor:
        chosen.append(tiles(*given))
        return chosen[-1]

    monkeypatch.setattr(nabla, "tile_mask", choose)
    assembly = speed.make_assembly(checkpoint, "nabla", gradient_accumulation_steps=2)
    batch = speed.make_batch(checkpoint, "nabla")
    step.predict_now(assembly, step.noisy_batch(assembly, batch, 0, 0))

    assert assembly.take_tiles() == {}

    chosen.clear()
    report = step.optimizer_step(assembly, Batches(batch, batch), 0)

    assert len(chosen) == 2 * 2

    density = torch.stack(chosen).float().mean().item()
    assert 0.1 < density < 0.99
    assert report.densities == {512: pytest.approx(density)}
    assert row_of(report)["attention_density"] == round(density, 4)

    work = batch_work(batch, assembly.adapter.spec, assembly.sample_flops).times(2)
    blocks = 2
    width = 32

    assert work.sparse == 2 * 3 * blocks * 4 * 512**2 * width
    assert report.flops == pytest.approx(work.total - (1 - density) * work.sparse)
