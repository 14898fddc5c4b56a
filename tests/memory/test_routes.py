"""Token routes in the estimate: fewer FLOPs, less time, fewer bytes, in training alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.models import SHAPES
from benchmarks.tread import share_of_arithmetic
from simpletuner.config.tread import Route, tokens_by_block
from simpletuner.memory.device import Device
from simpletuner.memory.duration import forward_seconds, step_cost
from simpletuner.memory.estimate import Setup, inputs_on_host_bytes, step_memory
from simpletuner.models.cost import Adapters, Load, TransformerCost
from simpletuner.models.kandinsky5.cost import VIDEO_COST, transformer_cost
from simpletuner.models.lora_targets import matching_modules
from tests.memory.test_estimate import KANDINSKY, lora

GUIDES = (Route(0.5, 2, -2),)


def load_of(size: str) -> Load:
    """A sample of a benchmark."""
    frames, height, width = SHAPES[size].latents
    return Load(1, frames, height // 2, width // 2, SHAPES[size].caption)


@pytest.fixture
def lite() -> TransformerCost:
    return transformer_cost(SHAPES["lite"].settings)


@pytest.fixture
def setup(lite: TransformerCost) -> Setup:
    return lora(lite, KANDINSKY)


def test_tokens_of_each_block() -> None:
    assert tokens_by_block([], 4, 100, 1) == ()
    assert tokens_by_block([Route(0.0, 0, -1)], 4, 100, 1) == ()
    assert tokens_by_block([Route(0.5, 1, -2), Route(0.25, 3, 3)], 5, 101, 1) == (101, 50, 50, 76, 101)
    assert tokens_by_block([Route(0.7, 0, 0)], 2, 4 * 64, 64) == (64, 256), "whole tiles"
    assert tokens_by_block([Route(0.99, 0, 0)], 2, 128, 64) == (64, 128), "at least one"
    assert tokens_by_block([Route(0.5, 1, 9)], 2, 10, 1) == (10, 5), "of a checkpoint that is not here yet"


@pytest.mark.parametrize(("size", "limit"), [("image", 2.12), ("lite", 2.64), ("pro", 2.81)])
def test_what_the_arithmetic_allows(size: str, limit: float) -> None:
    """As benchmarks/tread.py has it: that neither counts text blocks nor the LoRA."""
    cost, device = transformer_cost(SHAPES[size].settings), Device.of("cpu")
    setup = lora(cost, KANDINSKY)
    plain = step_cost(cost, setup, load_of(size), device)
    routed = step_cost(cost, replace(setup, routes=GUIDES), load_of(size), device)
    saved = plain.executed.total / routed.executed.total
    assert saved == pytest.approx(1 / share_of_arithmetic(size, GUIDES), rel=0.01)
    assert saved == pytest.approx(limit, rel=0.01)
    assert plain.seconds / routed.seconds == pytest.approx(limit, rel=0.1)
    assert routed.model < plain.model and routed.traffic < plain.traffic
