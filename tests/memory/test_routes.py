"""Token routes in the estimate: fewer FLOPs, less time and fewer bytes, in training only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.models import SHAPES, cost_of, hollow_transformer
from benchmarks.tread import share_of_arithmetic
from simpletuner.budget.device import Device, rates_of
from simpletuner.budget.step_cost import Step
from simpletuner.budget.step_memory import StepModel
from simpletuner.config.techniques.tread import Route, tokens_by_block
from simpletuner.models.cost import BatchShape, TransformerCost
from simpletuner.models.kandinsky5.cost import VIDEO_COST
from simpletuner.planning.techniques.spec import TechniqueCost, TechniqueSpec
from simpletuner.planning.techniques.tread import TreadSpec
from tests.budget.test_estimate import KANDINSKY, lora, under


class Costly(TechniqueSpec):
    """A technique with a given cost."""

    def __init__(self, **extra: float) -> None:
        self.extra: Any = extra

    def cost(self, transformer: TransformerCost, batch: BatchShape) -> TechniqueCost:
        return TechniqueCost(**self.extra)


GUIDES = TreadSpec([Route(0.5, 2, -2)])
H100 = Device("H100", None, None, True, rates_of("NVIDIA H100"), "")


def load_of(size: str) -> BatchShape:
    """A sample of a benchmark."""
    frames, height, width = SHAPES[size].latents
    return BatchShape(1, frames, height // 2, width // 2, SHAPES[size].caption)


@pytest.fixture
def lite() -> TransformerCost:
    return cost_of(VIDEO_COST, hollow_transformer("lite"))


@pytest.fixture
def setup(lite: TransformerCost) -> StepModel:
    return lora(lite, KANDINSKY)


def test_the_plan_counts_the_tokens_of_every_block() -> None:
    assert tokens_by_block([], 4, 100, 1) == ()
    assert tokens_by_block([Route(0.0, 0, -1)], 4, 100, 1) == ()
    assert tokens_by_block([Route(0.5, 1, -2), Route(0.25, 3, 3)], 5, 101, 1) == (
        101,
        50,
        50,
        76,
        101,
    )
    assert tokens_by_block([Route(0.7, 0, 0)], 2, 4 * 64, 64) == (64, 256), "whole tiles"
    assert tokens_by_block([Route(0.99, 0, 0)], 2, 128, 64) == (64, 128), "at least one"
    assert tokens_by_block([Route(0.5, 1, 9)], 2, 10, 1) == (10, 5), (
        "of a checkpoint that is not here yet"
    )


@pytest.mark.parametrize(("size", "limit"), [("image", 2.12), ("lite", 2.64), ("pro", 2.81)])
def test_routes_save_the_flops_of_skipped_tokens(size: str, limit: float) -> None:
    """Like benchmarks/tread.py, which counts neither text blocks nor the LoRA."""
    cost = cost_of(VIDEO_COST, hollow_transformer(size))
    setup = lora(cost, KANDINSKY)
    plain = Step(setup, load_of(size), H100).cost
    routed = Step(replace(setup, techniques=(GUIDES,)), load_of(size), H100).cost
    saved = plain.executed.total / routed.executed.total

    assert saved == pytest.approx(1 / share_of_arithmetic(size, GUIDES.routes), rel=0.01)
    assert saved == pytest.approx(limit, rel=0.01)
    assert plain.seconds / routed.seconds == pytest.approx(limit, rel=0.1)
    assert plain.model / routed.model == pytest.approx(limit, rel=0.02)
    assert routed.traffic < 0.6 * plain.traffic


def test_a_route_that_keeps_all_tokens_changes_nothing(
    lite: TransformerCost, setup: StepModel
) -> None:
    neutral = replace(setup, techniques=(TreadSpec([Route(0.0, 2, -2)]),))
    load = load_of("lite")

    assert Step(neutral, load, H100).cost == Step(setup, load, H100).cost
    assert neutral.memory(load) == setup.memory(load)


def test_routes_do_not_change_the_cost_of_previews(lite: TransformerCost, setup: StepModel) -> None:
    routed = replace(setup, techniques=(GUIDES,))
    assert (
        Step(routed, load_of("lite"), H100).forward_seconds
        == Step(setup, load_of("lite"), H100).forward_seconds
    )


@pytest.mark.parametrize(
    "device",
    [H100, replace(H100, rates=replace(H100.rates, transfer=1.0))],
    ids=["compute", "copy"],
)
def test_extra_passes_are_counted(lite: TransformerCost, setup: StepModel, device: Device) -> None:
    """Extra passes process all tokens, with and without gradients."""

    def seconds(**extra: float) -> float:
        routed = replace(
            under(setup, enable_group_offload=True), techniques=(GUIDES, Costly(**extra))
        )
        return Step(routed, load_of("lite"), device).cost.seconds

    routed = replace(setup, techniques=(GUIDES, Costly(passes=0.25)))

    # No route is taken, and the gradients of one pass wait for the other.
    memory = routed.memory(load_of("lite"))
    assert memory.gradients == setup.gradient_bytes
    assert replace(memory, gradients=0.0) == replace(setup.memory(load_of("lite")), gradients=0.0)

    plain = seconds()
    whole = Step(under(setup, enable_group_offload=True), load_of("lite"), device).cost.seconds

    assert seconds(passes=0.25, flops=0.0) == pytest.approx(plain + 0.25 * whole)

    alone = seconds(forwards=2) - plain
    unrouted = 2 * Step(setup, load_of("lite"), H100).forward_seconds

    assert alone == pytest.approx(unrouted if device is H100 else plain)


def test_only_kept_tokens_have_activations(lite: TransformerCost, setup: StepModel) -> None:
    """Of 32 blocks 29 lie in the route; its first one keeps all tokens, to pick from. The last
    block is whole.
    """
    load = load_of("lite")
    routed = replace(setup, techniques=(GUIDES,))
    one = lite.activations(load, 2, setup.adapters)
    plain = setup.memory(load)
    fewer = routed.memory(load)

    assert plain.inputs == 32 * one.held
    assert fewer.inputs == pytest.approx((32 - 28 / 2) * one.held)
    assert fewer.block == plain.block

    everywhere = replace(setup, techniques=(TreadSpec([Route(0.5, 0, -1)]),)).memory(load)
    assert everywhere.block < 0.6 * plain.block, "no block has all tokens"

    plain, fewer = (
        under(model, gradient_checkpointing=False).memory(load) for model in (setup, routed)
    )
    assert plain.inputs == 32 * (one.held + one.saved)

    half = lite.activations(replace(load, frames=load.frames // 2), 2, setup.adapters)
    inputs = 3 * (one.held + one.saved) + one.held + 28 * half.held + 29 * half.saved

    assert fewer.inputs == pytest.approx(inputs)

    on_host, hosted = (under(model, offload_block_inputs=True) for model in (setup, routed))
    assert on_host.inputs_on_host_bytes(load) == 30 * one.held
    assert hosted.inputs_on_host_bytes(load) == pytest.approx((2 + 28 / 2) * one.held)


def test_tiles_stay_together() -> None:
    cost = VIDEO_COST.of_flavour("t2v-pro-sft-5s-hd")
    load = cost.routed(BatchShape(1, 3, 8, 8, 256), [Route(0.5, 1, 1)])
    assert load.kept[:3] == (192, 128, 192)
