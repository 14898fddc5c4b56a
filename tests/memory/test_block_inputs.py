"""Inputs of checkpointed blocks are offloaded to host memory, and nothing else changes."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from simpletuner.memory.offload import attach, block_inputs, side_stream
from simpletuner.memory.offload.block_inputs import BlockInputs
from tests.tools.streaming import BLOCKS, CPU, AdversarialCopier, Trained, assert_equal

pytestmark = pytest.mark.warns  # on a CPU, they save nothing


class Counting(BlockInputs):
    """Counts copies to the host and back."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.left = 0
        self.fetched = 0

    def _to_host(self, tensor: Tensor) -> Any:
        self.left += 1
        return super()._to_host(tensor)

    def _fetch(self, kept: Any) -> Any:
        self.fetched += 1
        return super()._fetch(kept)

    def buffers(self) -> int:
        return len(self._free)


@pytest.mark.parametrize("interval", [None, 2])
@pytest.mark.parametrize("streams", [False, True])
def test_training_with_offloaded_block_inputs_is_bit_equal(
    monkeypatch: pytest.MonkeyPatch, interval: int | None, streams: bool
) -> None:
    monkeypatch.setattr(attach, "choose_copier", lambda *place, **settings: AdversarialCopier())
    inputs = Counting()
    plain = Trained(interval=interval)
    offloaded = Trained(interval=interval, block_inputs=inputs)
    if streams:
        offloaded.offloaded()
    checkpointed = BLOCKS // (interval or 1)

    for step in range(1, 4):
        assert_equal(offloaded.step(), plain.step())
        assert (inputs.left, inputs.fetched) == (step * checkpointed, step * checkpointed), (
            "each goes and comes once"
        )
        assert inputs.buffers() == checkpointed, "the buffers of the last step are used again"

    offloaded.sample()
    assert inputs.left == 3 * checkpointed, "sampling keeps nothing"


def test_inputs_below_the_first_trained_block_stay() -> None:
    inputs = Counting()
    last = r"visual_transformer_blocks\.4\..*to_query"
    offloaded = Trained(block_inputs=inputs, targets=last)

    assert_equal(offloaded.step(), Trained(targets=last).step())
    assert (inputs.left, inputs.fetched) == (1, 1)


def test_two_graphs_may_be_alive_at_a_time() -> None:
    """Buffers of a graph that is still alive are not used again."""
    plain = Trained()
    ours = Trained(block_inputs=BlockInputs(CPU))
    losses = [
        [model.predict(timestep).square().mean() for timestep in (100.0, 800.0)]
        for model in (plain, ours)
    ]
    for model, (first, second) in zip((plain, ours), losses, strict=True):
        first.backward()
        second.backward()
        assert model.lora_weights()[0].grad is not None

    for expected, actual in zip(plain.lora_weights(), ours.lora_weights(), strict=True):
        assert torch.equal(expected.grad, actual.grad)


def test_an_offloaded_tensor_is_freed_on_the_device() -> None:
    inputs = BlockInputs(CPU)
    weight = torch.ones(4, requires_grad=True)
    hidden = torch.rand(4)
    storage = weakref.ref(hidden.untyped_storage())
    expected = hidden.clone()
    with inputs.around(hidden):
        product = weight * hidden
    del hidden

    assert storage() is None, "the graph holds its copy, not the tensor"

    product.sum().backward()
    assert torch.equal(weight.grad, expected)


def test_buffers_serve_tensors_of_any_shape() -> None:
    """A run of many bucket shapes takes as many buffers as its largest step has blocks."""
    inputs = BlockInputs(CPU)
    weight = torch.ones((), requires_grad=True)
    for size in (5, 3, 8, 8, 2):
        hidden = [torch.rand(size, dtype=dtype) for dtype in (torch.float32, torch.float64)]
        products = []
        for states in hidden:
            with inputs.around(states):
                products.append((weight * states).sum())
        sum(products).backward()
        torch.testing.assert_close(weight.grad, sum(states.sum() for states in hidden).float())
        weight.grad = None
        del products
        assert len(inputs._free) == 2


class FakeStream:
    """A stream that records what it waits for."""

    def __init__(self) -> None:
        self.waited: list[Any] = []

    def record_event(self) -> object:
        return object()

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def wait_stream(self, actual: object) -> None:
        pass


def test_the_device_holds_at_most_two_offloaded_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute waits for their copies; their memory is pinned in place, at its own size."""
    inputs = BlockInputs(CPU)
    compute = FakeStream()
    locked: list[int] = []
    inputs.side.stream = FakeStream()  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(side_stream, "page_lock", lambda flat, owner: locked.append(flat.nbytes))
    weight = torch.ones(5, requires_grad=True)
    storages = []
    copies = []
    products = []
    for _ in range(6):
        hidden = torch.rand(5)
        storages.append(weakref.ref(hidden.untyped_storage()))
        with inputs.around(hidden):
            products.append(weight * hidden)
        copies.append(inputs.side._kept[-1][1])
        del hidden
        assert [storage() is not None for storage in storages[-3:]] == [False, True, True][
            -len(storages[-3:]) :
        ]

    assert compute.waited == copies[:4]
    assert locked == [20] * 6

    sum(product.sum() for product in products).backward()
    assert not inputs.side._kept


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("streams", [False, True])
def test_block_inputs_are_offloaded_on_a_gpu(streams: bool) -> None:
    device = torch.device("cuda")
    plain = Trained()
    offloaded = Trained(block_inputs=BlockInputs(device))
    for model in (plain, offloaded):
        model.to(device)
    if streams:
        offloaded.offloaded(device=device, group_offload_use_stream=True)

    for _ in range(3):
        assert_equal(offloaded.step(), plain.step())


@pytest.mark.parametrize(("on_gpu", "warns"), [(True, False), (False, True)])
def test_offloading_inputs_in_vain_is_warned_about(
    on_gpu: bool,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if on_gpu:
        side = SimpleNamespace(stream=object())
        monkeypatch.setattr(block_inputs, "SideStream", lambda device: side)

    BlockInputs(CPU)

    warning = "offload_block_inputs saves nothing: the compute device is not a CUDA device."
    assert caplog.messages == [warning] * warns
