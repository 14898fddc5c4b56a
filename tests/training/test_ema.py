"""The moving average follows its formula exactly, and swapping it restores the weights."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simpletuner.config.schema import EmaConfig
from simpletuner.training import ema as ema_module
from simpletuner.training.ema import Ema
from tests.tools.tolerances import ELEMENTWISE, assert_close

CPU = torch.device("cpu")
META = torch.device("meta")
Parameters = dict[str, nn.Parameter]


def parameters(dtype: torch.dtype = torch.float32) -> Parameters:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (40, 7), "b": (5,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in shapes.items()
    }


def train(weights: Parameters, ema: Ema, first: int, last: int) -> list[float]:
    """Train with weights that depend only on the step; returns the decays used."""
    decays = []
    for step in range(first, last + 1):
        with torch.no_grad():
            for weight in weights.values():
                weight.copy_(
                    torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
                )
        ema.update(step)
        decays.append(ema.decay_value)
    return decays


def test_the_decay_follows_its_formula() -> None:
    weights = parameters()
    decays = train(weights, Ema(weights, EmaConfig(ema_decay=0.5), CPU), 1, 20)

    assert decays[0] == 0
    assert decays[1:] == pytest.approx([min(step / (9 + step), 0.5) for step in range(2, 21)])
    assert decays[-1] == 0.5


def test_before_the_warmup_step_the_average_is_a_copy() -> None:
    weights = parameters()
    ema = Ema(weights, EmaConfig(ema_warmup_steps=5), CPU)

    assert train(weights, ema, 1, 4) == [0, 0, 0, 0]
    assert torch.equal(ema.average["a"], weights["a"])
    assert train(weights, ema, 5, 5) == [pytest.approx(5 / 14)]
    assert not torch.equal(ema.average["a"], weights["a"])


def test_the_average_follows_its_recursion() -> None:
    weights = parameters()
    ema = Ema(weights, EmaConfig(), CPU)
    expected = None
    for step in range(1, 8):
        (decay,) = train(weights, ema, step, step)
        weight = weights["a"].detach().double()
        expected = weight if expected is None else decay * expected + (1 - decay) * weight
    assert expected is not None

    assert_close(ema.average["a"].double(), expected, terms=7 * ELEMENTWISE)


def test_only_multiples_of_the_interval_update() -> None:
    weights = parameters()
    start = weights["a"].detach().clone()
    ema = Ema(weights, EmaConfig(ema_update_interval=2), CPU)
    train(weights, ema, 1, 1)

    assert torch.equal(ema.average["a"], start)
    assert train(weights, ema, 2, 2) == [0]  # the first update is a copy

    second = weights["a"].detach().clone()
    assert torch.equal(ema.average["a"], second)

    train(weights, ema, 3, 3)
    assert torch.equal(ema.average["a"], second)
    assert train(weights, ema, 4, 4) == [pytest.approx(4 / 13)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "keys",
    [
        {"ema_foreach_disable": True},
        {"ema_device": "accelerator"},
        {"ema_cpu_only": True, "ema_device": "accelerator"},
    ],
)
def test_device_and_foreach_do_not_change_a_bit(
    dtype: torch.dtype, keys: dict[str, object]
) -> None:
    averages: list[dict[str, Tensor]] = []
    for more in ({}, keys):
        weights = parameters(dtype)
        ema = Ema(weights, EmaConfig(**more), CPU)
        train(weights, ema, 1, 30)
        averages.append(ema.average)

    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])
    assert {tensor.dtype for tensor in averages[0].values()} == {torch.float32}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("place", ["cpu", "accelerator"])
@pytest.mark.parametrize("foreach_disable", [True, False])
def test_averages_on_gpu_and_cpu_are_bit_equal(foreach_disable: bool, place: str) -> None:
    averages = []
    for device in (CPU, torch.device("cuda")):
        weights = {name: nn.Parameter(weight.to(device)) for name, weight in parameters().items()}
        keys = {"ema_device": place, "ema_foreach_disable": foreach_disable}
        ema = Ema(weights, EmaConfig(**keys), device)
        assert ema.average["a"].device.type == ("cpu" if place == "cpu" else device.type)
        train(weights, ema, 1, 30)
        averages.append(ema.average["a"].cpu())
    assert torch.equal(*averages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applied_swaps_weights_in_place_and_restores_them_exactly(dtype: torch.dtype) -> None:
    weights = parameters(dtype)
    ema = Ema(weights, EmaConfig(), CPU)
    train(weights, ema, 1, 5)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    places = {name: weight.data_ptr() for name, weight in weights.items()}

    def look(fail: bool) -> None:
        with ema.applied():
            assert torch.equal(weights["a"], ema.average["a"].to(dtype))
            assert {name: weight.data_ptr() for name, weight in weights.items()} == places
            if fail:
                raise KeyboardInterrupt

    look(fail=False)

    assert all(torch.equal(weights[name], before[name]) for name in weights)
    with pytest.raises(KeyboardInterrupt):
        look(fail=True)
    assert all(torch.equal(weights[name], before[name]) for name in weights)
    assert all(weight.requires_grad for weight in weights.values())


@pytest.mark.parametrize("keys", [{}, {"ema_update_interval": 3}, {"ema_warmup_steps": 8}])
@pytest.mark.parametrize("stop", [1, 2, 7])
def test_a_resumed_average_continues_bit_for_bit(keys: dict[str, object], stop: int) -> None:
    whole_weights = parameters()
    weights = parameters()
    whole = Ema(whole_weights, EmaConfig(**keys), CPU)
    decays = train(whole_weights, whole, 1, 12)
    first = Ema(weights, EmaConfig(**keys), CPU)
    train(weights, first, 1, stop)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second = Ema(weights, EmaConfig(**keys), CPU)
    second.load_state_dict(torch.load(buffer, weights_only=True))

    assert second.decay_value == first.decay_value
    assert train(weights, second, stop + 1, 12) == decays[stop:]
    assert all(torch.equal(second.average[name], whole.average[name]) for name in weights)


class Copies(TorchDispatchMode):
    """Counts copies to the meta device, which stands in for a second device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += (
            func is torch.ops.aten._to_copy.default and (kwargs or {}).get("device") == META
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("bundle", "copies"), [(1 << 24, 1), (400, 2), (1, 3)])
def test_small_weights_are_copied_to_another_device_together(
    monkeypatch: pytest.MonkeyPatch, bundle: int, copies: int
) -> None:
    monkeypatch.setattr(ema_module, "BUNDLE", bundle)
    weights = {
        name: nn.Parameter(torch.randn(size)) for name, size in (("a", 200), ("b", 200), ("c", 300))
    }
    average = Ema(weights, EmaConfig(ema_device="accelerator"), META)
    with Copies() as counted:
        average.update(1)

    assert counted.count == copies

    result = Ema(weights, EmaConfig(), CPU).average
    assert all(torch.equal(result[name], weights[name]) for name in weights)


def test_the_average_is_saved_without_a_second_copy_of_it() -> None:
    ema = Ema(parameters(), EmaConfig(), CPU)
    addresses = {tensor.data_ptr() for tensor in ema.average.values()}
    assert {tensor.data_ptr() for tensor in ema.state_dict()["average"].values()} == addresses
