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
        reduced: to sum gradients on all processes (DDP), also those of adapters and techniques beside FSDP2.
        gathered: to gather weights (FSDP2).
        scattered: to sum each gradient where it belongs (FSDP2, full fine-tunes).
    """

    reduced: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0

    @property
    def total(self) -> float:
        return self.reduced + self.gathered + self.scattered


def sent_bytes(cost: TransformerCost, setup: TrainingSetup, added: TechniqueCost, micro_steps: int) -> Sent:
    """What each process sends: DDP does so once in an optimizer step, FSDP2 in each micro-step, but for gradients that
    are kept whole.

    Args:
        added: what techniques add to a micro-step.
    """
    if not setup.trains:
        return Sent()
    share = (setup.processes - 1) / setup.processes
    weights = sum(cost.block_bytes(setup.dtype, quantised=0.0)) + cost.rest_bytes(setup.dtype)
    gradients = weights if setup.is_full else trained_numbers(cost, setup) * setup.trained_bytes
    beside = added.parameters * BYTES["fp32"]  # of techniques
    if not setup.sharded:
        return Sent(reduced=2 * share * (gradients + beside))
    backward = 1 + added.passes
    scatters = 1 if setup.whole_gradients else backward * micro_steps
    times = backward + added.forwards + (backward if setup.reshards else 0.0)
    return Sent(
        reduced=2 * share * (beside if setup.is_full else gradients + beside),
        gathered=share * weights * times * micro_steps,
        scattered=share * weights * scatters if setup.is_full else 0.0,
    )


def link_rate(device: Device, machines: int) -> float:
    """Bytes per second between devices, assumed: through the host's bus, and the network between machines."""
    return min(device.rates.transfer, NETWORK) if machines > 1 else device.rates.transfer
