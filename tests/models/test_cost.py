"""The cost model against the models themselves: shapes on the meta device, FLOPs and kept bytes on
real tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
from simpletuner.models.cost_table import peak_of, read_cost_table, sum_of
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


@pytest.mark.slow(5)
@pytest.mark.parametrize("specs", PACKAGES.values(), ids=PACKAGES)
def test_the_cost_table_equals_a_new_measurement(specs: list[FamilySpec]) -> None:
    """On a small model that no factor was fitted to; `python -m benchmarks.cost_table` writes a new
    table.
    """
    table = read_cost_table(specs[0].cost.package)
    structure = structure_of(specs[0].name)
    assert structure == {key: getattr(table, key) for key in structure}
    assert [each for spec in specs for each in shapes_of(spec)] == table.published
    for kind, factors in table.bytes.items():
        dtype = torch.bfloat16 if kind.startswith("bf16") else torch.float32
        case = Case(4, 64, 4, 3, 8, 16, 20)
        trial = Trial(specs[0].name, case, dtype, given=kind.endswith("given"), rows=table.rows)
        metered = metered_block(trial, backend=None)
        assert metered.reads == factors["reads"]
        sums = {name: sum_of(factors[name], trial.numbers) for name in metered.bytes}
        planned = sums | {"sampling": peak_of(factors["sampling"], trial.numbers)}
        found = {**metered.bytes, "sampling": max(metered.moments)}
        assert planned == pytest.approx(found, rel=0.01)


@pytest.mark.slow(15)
@pytest.mark.thorough
@pytest.mark.parametrize("specs", PACKAGES.values(), ids=PACKAGES)
def test_the_cost_table_counts_what_compiled_kernels_move(specs: list[FamilySpec]) -> None:
    """With many tokens, as in a run. A block with a given first frame has a test in
    test_sana_block.
    """
    table = read_cost_table(specs[0].cost.package)
    trial = Trial(specs[0].name, Case(5, 64, 4, 4, 32, 32, 8), torch.bfloat16, rows=table.rows)
    moved = Counter[str]()

    metered_block(trial, backend=counting(moved))

    factors = table.bytes["bf16"]
    assert len(moved) == 2, "forward and backward"
    planned = {way: sum_of(factors[f"compiled {way}"], trial.numbers) for way in moved}
    assert planned == pytest.approx(moved, rel=0.02)


# What performance counters say of the published models: gigabytes in bf16, tokens, forward TFLOP,
# attention's share, and TFLOP of a LoRA step of rank 16, as the mathematics needs it and as it is
# executed with checkpointing.
PUBLISHED: list[tuple[str, FamilyCost, str, float, BatchShape, float, float, float, float]] = [
    (
        "lite",
        VIDEO_COST,
        "t2v-lite-sft-5s",
        4.6,
        BatchShape(1, 16, 32, 48, 256),
        211,
        0.66,
        563,
        844,
    ),
    ("image", IMAGE_COST, "t2i-lite-sft", 13.3, BatchShape(1, 1, 64, 64, 512), 48, 0.20, 106, 159),
    (
        "pro",
        VIDEO_COST,
        "t2v-pro-sft-5s-hd",
        43,
        BatchShape(1, 31, 32, 48, 256),
        3586,
        0.63,
        9417,
        14125,
    ),
    (
        "pro-hd",
        VIDEO_COST,
        "t2v-pro-sft-5s-hd",
        43,
        BatchShape(1, 31, 48, 80, 256),
        17323,
        0.81,
        48615,
        72919,
    ),
    ("sana", SANA_COST, "2b-480p", 4.1, BatchShape(1, 21, 30, 52, 300), 122, 0.015, 246, 369),
]


@pytest.mark.parametrize(
    ("cost", "flavour", "weights", "load", "forward", "share", "model", "executed"),
    [row[1:] for row in PUBLISHED],
    ids=[row[0] for row in PUBLISHED],
)
def test_flops_of_published_models_have_not_changed(
    cost: FamilyCost,
    flavour: str,
    weights: float,
    load: BatchShape,
    forward: float,
    share: float,
    model: float,
    executed: float,
) -> None:
    transformer = cost.of_flavour(flavour, attention_type="regular")
    adapters = adapters_of(
        transformer, SANA_TARGETS if cost is SANA_COST else KANDINSKY_TARGETS, 16
    )
    in_bf16 = sum(transformer.block_bytes("bf16", quantised=0.0)) + transformer.rest_bytes("bf16")
    assert in_bf16 / 1e9 == pytest.approx(weights, rel=0.02)
    work = transformer.forward(load)
    assert work.total / 1e12 == pytest.approx(forward, rel=0.02)
    assert work.attention / work.total == pytest.approx(share, abs=0.01)
    once = transformer.forward(load, adapters)
    step = once + transformer.backward(load, adapters, full=False)
    assert step.total / 1e12 == pytest.approx(model, rel=0.02)
    again = transformer.forward(load, adapters, blocks_only=True)
    assert (step + again + Work(0.0, once.attention / 2)).total / 1e12 == pytest.approx(
        executed, rel=0.02
    )


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
    """FLOPs of everything that runs, attention by its plain products, so that no kernel hides
    any.
    """
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
    found = counted(lambda: model(**inputs)[0].pow(2).mean().backward())
    # The recomputation stops at the last tensor that the backward pass asks for, and the first
    # block's text needs less.
    assert found == pytest.approx(expected.total, rel=0.01)


def test_flops_of_a_full_step_are_exact() -> None:
    """Sana is left out: the counter takes the weight gradient of a depthwise convolution for that
    of a dense one.
    """
    cost, model, inputs, load, _ = kandinsky_case()
    expected = cost.forward(load) + cost.backward(load, NO_ADAPTERS, full=True)
    found = counted(lambda: model(**inputs)[0].pow(2).mean().backward())
    assert found == pytest.approx(expected.total, rel=0.01)


def metered(
    model: Any, block: nn.Module, arguments: tuple[Any, ...], streams: tuple[int, ...]
) -> int:
    """Bytes that autograd keeps of one block when gradients flow into some of its arguments."""
    arguments = tuple(
        argument.detach().requires_grad_() if index in streams else argument
        for index, argument in enumerate(arguments)
    )
    there = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    with saved_bytes([*model.parameters(), *model.buffers(), *there]) as meter:
        block(*arguments)
    return meter.bytes


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
    found = metered(
        model, block, block_inputs(model, inputs, block), streams=(0, 1)
    )  # pixels and text
    planned = cost.activations(BatchShape(2, 3, 8, 8, 6), dtype.itemsize, adapters)
    assert found == pytest.approx(planned.saved, rel=0.05)


def test_a_given_first_frame_costs_more_only_with_timesteps_per_token() -> None:
    kandinsky = VIDEO_COST.of_flavour("i2v-lite-5s")
    sana = SANA_COST.of_flavour("2b-480p")
    plain = BatchShape(1, 4, 8, 8, 300)
    given = BatchShape(1, 4, 8, 8, 300, timed_tokens=True)
    for size in (2, 4):
        assert kandinsky.activations(plain, size, NO_ADAPTERS) == kandinsky.activations(
            given, size, NO_ADAPTERS
        )
        assert (
            sana.activations(plain, size, NO_ADAPTERS).saved
            < sana.activations(given, size, NO_ADAPTERS).saved
        )


def test_a_sparse_block_also_saves_its_mask() -> None:
    """Beside the dense block's, a mask of 4 tiles x 256 keys for each head."""
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
    found = metered(model, block, block_inputs(model, inputs, block), streams=(0, 1))
    load = BatchShape(2, 1, 16, 16, 6)
    planned = cost.activations(load, 4, adapters)
    dense = cost_of(VIDEO_COST, plain, attention_type="regular").activations(load, 4, adapters)
    assert planned.saved - dense.saved == 2 * 4 * 256 * 2 * 4
    assert found == pytest.approx(planned.saved, rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sana_block_saves_the_planned_bytes(dtype: torch.dtype) -> None:
    model: Any = build_sana()
    cost = cost_of(SANA_COST, model)
    adapters = adapters_of(cost, SANA_TARGETS, 2)
    model = with_lora(model, adapters).to(dtype)
    block = model.transformer_blocks[1]
    found = metered(
        model, block, block_inputs(model, sana_inputs(5, 32, dtype), block), streams=(0,)
    )
    planned = cost.activations(BatchShape(2, 5, 16, 16, 300), dtype.itemsize, adapters)
    assert found == pytest.approx(planned.saved, rel=0.05)
