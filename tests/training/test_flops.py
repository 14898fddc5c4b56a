"""The cost that MFU is measured by: what a meter on the real classes counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.models import SHAPES, hollow_transformer, lora_targets
from benchmarks.variants import Variant
from simpletuner.config.tread import Route
from simpletuner.models.registry import FAMILIES
from simpletuner.techniques.tread import Tread
from simpletuner.training import step
from simpletuner.training.lora import LoraAdapter
from simpletuner.training.losses import Losses
from simpletuner.training.meter import batch_flops, count_flops


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
def test_a_meter_counts_the_same(size: str, routes: list[Route]) -> None:
    techniques = [Tread(routes)] if routes else []
    variant = Variant(size, "cpu", {"gradient_checkpointing": False, "speed": "reference"}, techniques)
    assembly = variant.assembly
    assert assembly.sample_flops is not None
    batch = variant.loader.batch
    # The meter does not know the CPU's own attention kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as meter:
        step.run_micro_step(assembly, batch, 0, 0, Losses())
    told = assembly.sample_flops(SHAPES[size].tokens, SHAPES[size].caption)
    assert told == pytest.approx(meter.get_total_flops(), rel=1e-6)
    assert batch_flops(assembly, batch) == told


@pytest.mark.parametrize(("size", "teraflops"), [("lite", 563), ("image", 106), ("pro", 9417), ("sana", 246)])
def test_real_models(size: str, teraflops: float) -> None:
    """Metered once on the real architectures, with a LoRA on queries, keys and values."""
    from peft import LoraConfig

    model: Any = hollow_transformer(size)
    targets = ["to_q", "to_k", "to_v"] if size == "sana" else lora_targets(size)
    with torch.device("meta"):
        model.add_adapter(settings := LoraConfig(r=16, target_modules=targets))
    flops = count_flops(model, FAMILIES[SHAPES[size].family].cost, LoraAdapter(model, settings).adapters, [])
    assert flops(SHAPES[size].tokens, SHAPES[size].caption) / 1e12 == pytest.approx(teraflops, rel=0.03)


def test_tokens_that_pass_by_are_not_counted() -> None:
    told = {ratio: Variant("tiny", "cpu", {}, [Tread([Route(ratio, 0, -1)])]).step().flops for ratio in (0.0, 0.5)}
    assert told[0.0] == Variant("tiny", "cpu", {}).step().flops
    assert told[0.0] is not None
    assert told[0.5] is not None
    assert told[0.5] < 0.7 * told[0.0]
