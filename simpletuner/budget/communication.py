"""Counts what the processes of a run send each other in a step. Free of torch.

Ring algorithms of N processes send as little as possible: each sends (N - 1) / N of a tensor to gather it or to reduce
and scatter it, and twice that to reduce it on all (Patarasuk and Yuan, Journal of Parallel and Distributed Computing
69(2), 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner.budget.device import Device
from simpletuner.budget.estimate import TrainingSetup, trained_numbers
from simpletuner.models.cost import BYTES, TransformerCost
from simpletuner.techniques.spec import TechniqueCost

NETWORK = 12.5e9  # bytes/s between machines, assumed: 100 Gbit/s


@dataclass(frozen=True)
class Sent:
    """Bytes that each process sends in an optimizer step.

    Attributes:
        reduced: to sum gradients on all processes (DDP).
        gathered: to gather weights (FSDP2).
        scattered: to sum gradients where their share belongs (FSDP2).
    """

    reduced: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0

    @property
    def total(self) -> float:
        return self.reduced + self.gathered + self.scattered


def sent_bytes(cost: TransformerCost, setup: TrainingSetup, added: TechniqueCost, micro_steps: int) -> Sent:
    """What each process sends: with DDP once in an optimizer step, with FSDP2 in each micro-step.

    Args:
        added: what techniques add to a micro-step.
    """
    if not setup.trains:
        return Sent()
    share = (setup.processes - 1) / setup.processes
    blocks, rest = sum(cost.block_bytes(setup.dtype, quantised=0.0)), cost.rest_bytes(setup.dtype)
    adapters = 0.0 if setup.is_full else trained_numbers(cost, setup) * setup.trained_bytes
    gradients = (blocks + rest if setup.is_full else adapters) + added.parameters * BYTES["fp32"]
    if not setup.sharded:
        return Sent(reduced=2 * share * gradients)
    # What is outside the blocks stays gathered until the backward pass.
    again = blocks + adapters if setup.reshards else 0.0
    gathered = (blocks + adapters + rest) * (1 + added.passes + added.forwards) + again * (1 + added.passes)
    return Sent(gathered=share * gathered * micro_steps, scattered=share * gradients * micro_steps)


def link_rate(device: Device, machines: int) -> float:
    """Bytes per second between devices, assumed: through the host's bus, and the network between machines."""
    return min(device.rates.transfer, NETWORK) if machines > 1 else device.rates.transfer
