"""Bytes that processes send: computed by hand, and counted in torch's own FSDP2."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from simpletuner.budget.communication import Sent, exchange_seconds, sent_bytes
from simpletuner.budget.device import Device, rates_of
from simpletuner.budget.step_memory import StepModel
from simpletuner.config.launch import LaunchConfig
from simpletuner.models.cost import Adapters, TransformerCost
from simpletuner.models.cost_table import CostTable
from simpletuner.planning.techniques.spec import TechniqueCost
from tests.budget.test_estimate import make_config, under

WIDTH = 8
PROCESSES = 4
# Two blocks of 64 weights and a last layer of 32.
SHAPES = {
    "blocks.0.weight": (WIDTH, WIDTH),
    "blocks.1.weight": (WIDTH, WIDTH),
    "last.weight": (4, WIDTH),
}
TABLE = CostTable(("blocks",), (), {}, {}, keeps_attention=False, flops={}, bytes={}, published=())
COST = TransformerCost(TABLE, SHAPES, WIDTH)
FULL = StepModel(COST, make_config(model_type="full", num_processes=PROCESSES))
# 2 x (8 + 8) numbers of 4 bytes.
ADAPTERS = Adapters(2, frozenset({"blocks.0"}))
LORA = StepModel(COST, make_config(optimizer="adamw", num_processes=PROCESSES), ADAPTERS)
SHARDED = {"fsdp_enable": True}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (FULL, Sent(reduced=2 * 3 / 4 * 320)),
        (LORA, Sent(reduced=2 * 3 / 4 * 128)),
        (under(FULL, **SHARDED), Sent(gathered=3 / 4 * 2 * 320, scattered=3 / 4 * 320)),
        (
            under(FULL, **SHARDED, fsdp_reshard_after_forward=False),
            Sent(gathered=3 / 4 * 320, scattered=3 / 4 * 320),
        ),
        (under(LORA, **SHARDED), Sent(reduced=2 * 3 / 4 * 128, gathered=3 / 4 * 2 * 320)),
        (under(FULL, num_processes=1), Sent()),
        (replace(FULL, trains=False), Sent()),
    ],
)
def test_sent_bytes_equal_hand_computed_ones(model: StepModel, expected: Sent) -> None:
    accumulated = under(model, gradient_accumulation_steps=2)
    twice = replace(expected, gathered=2 * expected.gathered, scattered=2 * expected.scattered)

    assert sent_bytes(model, TechniqueCost()) == expected
    assert sent_bytes(accumulated, TechniqueCost()) == twice, "DDP sends once in an optimizer step"


def test_techniques_add_gradients_and_passes() -> None:
    added = TechniqueCost(parameters=10, forwards=1, passes=2)
    assert sent_bytes(FULL, added).reduced == 2 * 3 / 4 * (320 + 40)
    sharded = sent_bytes(under(FULL, **SHARDED), added)
    assert sharded == Sent(
        reduced=2 * 3 / 4 * 40, gathered=3 / 4 * 320 * 7, scattered=3 / 4 * 320 * 3
    )


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Processes whose collectives do nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=PROCESSES)
    try:
        yield init_device_mesh("cpu", (PROCESSES,))
    finally:
        distributed.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.last = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.last(x)


class Counted(TorchDispatchMode):
    """Bytes of all tensors that collectives gather or scatter, by collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.bytes[func._opname] += max(
                (leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), default=0
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reshards", [True, False])
def test_fsdp_sends_the_estimated_bytes(mesh: Any, reshards: bool) -> None:
    model = Model().to(torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
    with Counted() as counted:
        model(torch.zeros(1, WIDTH, dtype=torch.bfloat16)).sum().backward()
    planned = sent_bytes(
        under(FULL, **SHARDED, fsdp_reshard_after_forward=reshards), TechniqueCost()
    )
    expected = {"_allgather_base_": planned.gathered, "_reduce_scatter_base_": planned.scattered}

    ring_share = (PROCESSES - 1) / PROCESSES
    sent = {name: ring_share * size for name, size in counted.bytes.items()}
    assert sent == expected


def test_fsdp_divides_memory_by_the_processes() -> None:
    last = 64  # bytes of the last layer: 32 numbers of 2 bytes
    block = 128
    # Gathered weights of the block that computes, and of the next one, which has arrived.
    buffers = 2 * block
    full = under(FULL, **SHARDED)
    lora = under(LORA, **SHARDED)
    more_blocks = {f"blocks.{number}.weight": (WIDTH, WIDTH) for number in range(2, 8)}
    eight_blocks = replace(lora, cost=replace(COST, shapes=SHAPES | more_blocks))
    kept = under(eight_blocks, fsdp_reshard_after_forward=False)

    assert FULL.frozen_bytes == 0
    assert full.trained_bytes == FULL.trained_bytes / PROCESSES
    gradients = last + 2 * block  # of the block, and one buffer
    assert full.frozen_bytes == last + block + buffers + gradients
    assert lora.trained_bytes == LORA.trained_bytes, "a LoRA is whole in every process"
    assert lora.frozen_bytes == (last + 2 * block) / PROCESSES + last + block + buffers
    weights = last + 8 * block
    assert eight_blocks.frozen_bytes == weights / PROCESSES + last + block + buffers
    assert kept.frozen_bytes == weights / PROCESSES + weights + buffers


def test_network_between_machines_limits_the_rate() -> None:
    device = Device("H200", 1e12, None, True, rates_of("H200"), "")
    link = device.rates.link
    network = 12.5e9  # bytes/s: 100 Gbit/s
    sent = Sent(gathered=4e9, scattered=2e9)
    one_machine = LaunchConfig(num_processes=8)
    two_machines = LaunchConfig(num_processes=16, num_machines=2)
    fast_network = two_machines.model_copy(update={"network_gbit": 400})

    assert link > device.rates.transfer > network, "NVLink"
    assert exchange_seconds(sent, device, one_machine) == pytest.approx(6e9 / link)
    assert exchange_seconds(sent, device, two_machines) == pytest.approx(6e9 / network)
    assert exchange_seconds(sent, device, fast_network) == pytest.approx(6e9 / (4 * network))
