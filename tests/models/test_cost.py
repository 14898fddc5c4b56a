"""The cost model equals the models: their shapes, their FLOPs, and the bytes that they save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cost_table import (
    Case,
    Trial,
    counting,
    metered_block,
    packages,
    shapes_of,
    structure_of,
)
from benchmarks.models import cost_of
from simpletuner.models.cost import (
    NO_ADAPTERS,
    Adapters,
    BatchShape,
    FamilyCost,
    TransformerCost,
    Work,
)
from simpletuner.models.cost_table import CostTable, peak_of, read_cost_table, sum_of
from simpletuner.models.kandinsky5 import nabla
from simpletuner.models.kandinsky5.cost import IMAGE_COST, VIDEO_COST
from simpletuner.models.registry import FAMILIES
from simpletuner.models.sanavideo.cost import COST as SANA_COST
from simpletuner.models.spec import FamilySpec
from tests.tools.saved_tensors import saved_bytes
from tests.tools.tiny import build_kandinsky
from tests.tools.tiny_sana import build_sana
from tests.tools.transformers import (
    KANDINSKY_TARGETS,
    SANA_TARGETS,
    adapters_of,
    block_inputs,
    kandinsky_inputs,
    sana_inputs,
    with_lora,
)

FLAVOURS = [(spec, flavour.name) for spec in FAMILIES.values() for flavour in spec.flavours]


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("spec", "flavour"), FLAVOURS, ids=[name for _, name in FLAVOURS])
def test_published_shapes_are_those_of_diffusers(spec: FamilySpec, flavour: str) -> None:
    settings = spec.cost.published(flavour)

    with torch.device("meta"):
        model = getattr(diffusers, spec.cost.transformer_class)(**settings)

    assert spec.cost.of_flavour(flavour).shapes == shapes(model)


PACKAGES = packages()


@pytest.mark.thorough
@pytest.mark.slow(5)
@pytest.mark.parametrize("specs", PACKAGES.values(), ids=PACKAGES)
def test_the_cost_table_equals_a_new_measurement(specs: list[FamilySpec]) -> None:
    """On a small model that no factor was fitted to.

    `python -m benchmarks.cost_table` writes a new table.
    """
    table = read_cost_table(specs[0].cost.package)
    structure = structure_of(specs[0].name)
    assert structure == {key: getattr(table, key) for key in structure}
    published: list[Any] = []
    for spec in specs:
        published += shapes_of(spec)
    assert published == table.published
    for kind in table.bytes:
        check_bytes(specs[0].name, table, kind)


def check_bytes(family: str, table: CostTable, kind: str) -> None:
    """Measure one part of a table: a dtype, with timesteps per token if it ends with `given`."""
    factors = table.bytes[kind]
    dtype = torch.bfloat16 if kind.startswith("bf16") else torch.float32
    # Kernels are counted only in bf16, with many tokens as in a run, since compiling takes most of
    # the time. The kernels of a block with a given first frame are compared in test_sana_block.
    counts_kernels = kind == "bf16"
    if counts_kernels:
        case = Case(5, 64, 4, 4, 32, 32, 8)
    else:
        case = Case(4, 64, 4, 3, 8, 16, 20)
    trial = Trial(family, case, dtype, has_first_frame=kind.endswith("given"), rows=table.rows)
    moved = Counter[str]()

    block = metered_block(trial, backend=counting(moved) if counts_kernels else None)

    assert block.reads == factors["reads"]
    planned = {name: sum_of(factors[name], trial.numbers) for name in block.bytes}
    assert planned == pytest.approx(block.bytes, rel=0.01)
    assert peak_of(factors["sampling"], trial.numbers) == pytest.approx(
        max(block.moments), rel=0.01
    )
    planned_moves = {way: sum_of(factors[f"compiled {way}"], trial.numbers) for way in moved}
    assert planned_moves == pytest.approx(moved, rel=0.02)
    assert set(moved) == ({"forward", "backward"} if counts_kernels else set())


@dataclass(frozen=True)
class Published:
    """What a published model costs, as performance counters measured it.

    Attributes:
        gigabytes: of its weights in bf16.
        forward: TFLOP of a forward pass.
        attention_share: share of attention in these.
        step: TFLOP of a step of a LoRA of rank 16, as the mathematics needs it.
        executed: TFLOP of this step as it is executed with checkpointing.
    """

    cost: FamilyCost
    flavour: str
    batch: BatchShape
    gigabytes: float
    forward: float
    attention_share: float
    step: float
    executed: float


LITE = "t2v-lite-sft-5s"
PRO = "t2v-pro-sft-5s-hd"
PUBLISHED = {
    "lite": Published(VIDEO_COST, LITE, BatchShape(1, 16, 32, 48, 256), 4.6, 211, 0.66, 563, 844),
    "image": Published(
        IMAGE_COST, "t2i-lite-sft", BatchShape(1, 1, 64, 64, 512), 13.3, 48, 0.20, 106, 159
    ),
    "pro": Published(VIDEO_COST, PRO, BatchShape(1, 31, 32, 48, 256), 43, 3586, 0.63, 9417, 14125),
    "pro-hd": Published(
        VIDEO_COST, PRO, BatchShape(1, 31, 48, 80, 256), 43, 17323, 0.81, 48615, 72919
    ),
    "sana": Published(
        SANA_COST, "2b-480p", BatchShape(1, 21, 30, 52, 300), 4.1, 122, 0.015, 246, 369
    ),
}


@pytest.mark.parametrize("model", PUBLISHED.values(), ids=PUBLISHED)
def test_flops_of_published_models_have_not_changed(model: Published) -> None:
    cost = model.cost.of_flavour(model.flavour, attention_type="regular")
    targets = SANA_TARGETS if model.cost is SANA_COST else KANDINSKY_TARGETS
    adapters = adapters_of(cost, targets, 16)

    weights = sum(cost.block_bytes("bf16", quantised=0.0)) + cost.rest_bytes("bf16")
    frozen_forward = cost.forward(model.batch)
    forward = cost.forward(model.batch, adapters)
    step = forward + cost.backward(model.batch, adapters, full=False)
    recomputed = cost.forward(model.batch, adapters, blocks_only=True)

    assert weights / 1e9 == pytest.approx(model.gigabytes, rel=0.02)
    assert frozen_forward.total / 1e12 == pytest.approx(model.forward, rel=0.02)
    share = frozen_forward.attention / frozen_forward.total
    assert share == pytest.approx(model.attention_share, abs=0.01)
    assert step.total / 1e12 == pytest.approx(model.step, rel=0.02)
    # A flash kernel computes the scores again: one of the two products of its forward pass.
    executed = step + recomputed + Work(attention=forward.attention / 2)
    assert executed.total / 1e12 == pytest.approx(model.executed, rel=0.02)


Step = tuple[TransformerCost, Any, dict[str, Any], BatchShape, Adapters]


def kandinsky_case(rank: int = 4) -> Step:
    model = build_kandinsky()
    cost = cost_of(IMAGE_COST, model)
    return (
        cost,
        model,
        kandinsky_inputs(3, 8, 6, torch.float32),
        BatchShape(2, 3, 4, 4, 6),
        adapters_of(cost, KANDINSKY_TARGETS, rank),
    )


def sana_case(rank: int = 4) -> Step:
    model = build_sana()
    cost = cost_of(SANA_COST, model)
    return (
        cost,
        model,
        sana_inputs(3, 8, torch.float32),
        BatchShape(2, 3, 4, 4, 300),
        adapters_of(cost, SANA_TARGETS, rank),
    )


def counted(act: Callable[[], object]) -> int:
    """FLOPs of everything that runs; attention runs as plain products, which all are counted."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        act()
    return counter.get_total_flops()


@pytest.mark.parametrize("case", [kandinsky_case, sana_case], ids=["kandinsky", "sana"])
def test_flops_of_a_forward_pass_are_exact(case: Callable[[], Step]) -> None:
    cost, model, inputs, load, _ = case()
    with torch.no_grad():
        assert cost.forward(load).total == counted(lambda: model(**inputs))


@pytest.mark.parametrize("case", [kandinsky_case, sana_case], ids=["kandinsky", "sana"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
def test_flops_of_a_lora_step_are_exact(case: Callable[[], Step], checkpointed: bool) -> None:
    cost, model, inputs, load, adapters = case()
    model = with_lora(model, adapters)
    if checkpointed:
        model.enable_gradient_checkpointing(
            lambda block, *rest: checkpoint(block, *rest, use_reentrant=False)
        )
    expected = cost.forward(load, adapters) + cost.backward(load, adapters, full=False)
    if checkpointed:
        expected = expected + cost.forward(load, adapters, blocks_only=True)

    flops = counted(lambda: model(**inputs)[0].pow(2).mean().backward())

    # The recomputation stops at the last tensor that the backward pass asks for, and the first
    # block's text needs less.
    assert flops == pytest.approx(expected.total, rel=0.01)


def test_flops_of_a_full_step_are_exact() -> None:
    """Not of Sana: the counter takes depthwise weight gradients for those of dense convolutions."""
    cost, model, inputs, load, _ = kandinsky_case()
    expected = cost.forward(load) + cost.backward(load, NO_ADAPTERS, full=True)

    flops = counted(lambda: model(**inputs)[0].pow(2).mean().backward())

    assert flops == pytest.approx(expected.total, rel=0.01)


def metered(
    model: Any, block: nn.Module, arguments: tuple[Any, ...], differentiable: tuple[int, ...]
) -> int:
    """Bytes that autograd saves for a block whose arguments at these positions need gradients."""
    arguments = tuple(
        argument.detach().requires_grad_() if index in differentiable else argument
        for index, argument in enumerate(arguments)
    )
    inputs = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    with saved_bytes([*model.parameters(), *model.buffers(), *inputs]) as meter:
        block(*arguments)
    return meter.bytes


PIXELS_AND_TEXT = (0, 1)  # positions of a Kandinsky block's arguments


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "targets", [KANDINSKY_TARGETS, ["to_query", "feed_forward.in_layer", "feed_forward.out_layer"]]
)
def test_a_kandinsky_block_saves_the_planned_bytes(dtype: torch.dtype, targets: list[str]) -> None:
    model: Any = build_kandinsky()
    cost = cost_of(IMAGE_COST, model)
    adapters = adapters_of(cost, targets, 2)
    model = with_lora(model, adapters)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if cost.stays_float32(name) else dtype)
    inputs = kandinsky_inputs(3, 16, 6, dtype)
    block = model.visual_transformer_blocks[1]

    saved = metered(model, block, block_inputs(model, inputs, block), PIXELS_AND_TEXT)

    planned = cost.activations(BatchShape(2, 3, 8, 8, 6), dtype.itemsize, adapters)
    assert saved == pytest.approx(planned.saved, rel=0.05)


@pytest.mark.parametrize("size", [2, 4])
def test_a_given_first_frame_costs_more_only_with_timesteps_per_token(size: int) -> None:
    kandinsky = VIDEO_COST.of_flavour("i2v-lite-5s")
    sana = SANA_COST.of_flavour("2b-480p")
    plain = BatchShape(1, 4, 8, 8, 300)
    given = replace(plain, timed_tokens=True)

    def saved(cost: TransformerCost, batch: BatchShape) -> float:
        return cost.activations(batch, size, NO_ADAPTERS).saved

    assert saved(kandinsky, plain) == saved(kandinsky, given)
    assert saved(sana, plain) < saved(sana, given)


def test_a_sparse_block_also_saves_its_mask() -> None:
    """Masks, since a CPU has no tile lists."""
    model: Any = build_kandinsky(nabla=True, visual_cond=True)
    nabla.install(model)
    settings = dict(model.config)
    cost = cost_of(VIDEO_COST, model)
    adapters = adapters_of(cost, KANDINSKY_TARGETS, 2)
    inputs = kandinsky_inputs(1, 32, 6, torch.float32, channels=33)
    inputs["sparse_params"] = nabla.sparse_params(
        tuple(inputs["hidden_states"].shape), settings, torch.device("cpu")
    )
    plain = build_kandinsky(visual_cond=True)
    model = with_lora(model, adapters)
    block = model.visual_transformer_blocks[1]

    saved = metered(model, block, block_inputs(model, inputs, block), PIXELS_AND_TEXT)

    load = BatchShape(2, 1, 16, 16, 6)
    planned = cost.activations(load, 4, adapters)
    dense = cost_of(VIDEO_COST, plain, attention_type="regular").activations(load, 4, adapters)
    mask = 2 * 2 * 4 * 256 * 4  # samples, heads, tiles, keys, bytes
    assert planned.saved - dense.saved == mask
    assert saved == pytest.approx(planned.saved, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sana_block_saves_the_planned_bytes(dtype: torch.dtype) -> None:
    model: Any = build_sana()
    cost = cost_of(SANA_COST, model)
    adapters = adapters_of(cost, SANA_TARGETS, 2)
    model = with_lora(model, adapters).to(dtype)
    block = model.transformer_blocks[1]
    arguments = block_inputs(model, sana_inputs(5, 32, dtype), block)

    saved = metered(model, block, arguments, differentiable=(0,))

    planned = cost.activations(BatchShape(2, 5, 16, 16, 300), dtype.itemsize, adapters)
    assert saved == pytest.approx(planned.saved, rel=0.05)
