"""Estimates the duration of a step from its FLOPs and bytes, and what processes send each other. Free of torch.

    seconds = products / matmul rate + attention / attention rate + elementwise bytes / memory rate

or the time to launch the operations, or to copy streamed weights, whichever is longest. It is for stock, uncompiled
models, and excludes waiting for data.

Ring algorithms of N processes send as little as possible: each sends (N - 1) / N of a tensor to gather it or to reduce
and scatter it, and twice that to reduce it on all (Patarasuk and Yuan, Journal of Parallel and Distributed Computing
69(2), 2009).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from simpletuner.budget.device import Device
from simpletuner.budget.estimate import StepMemory, StepModel
from simpletuner.config.schema import SLOTS
from simpletuner.models.cost import ATTENTION_BACKWARD, BYTES, FLASH_BACKWARD, BatchShape, Work
from simpletuner.techniques.spec import TechniqueCost

# Operations of a block in forward plus backward, and seconds to launch one.
LAUNCHES, GPU_LAUNCH, CPU_LAUNCH = 450, 6e-6, 12e-6
FLOAT32_SHARE = 0.5  # rate of float32 products with TF32, relative to bf16
NETWORK = 12.5e9  # bytes/s between machines, assumed: 100 Gbit/s


@dataclass(frozen=True)
class StepCost:
    """Cost of one micro-batch, forward and backward.

    Attributes:
        model: FLOPs without recomputation, the basis of MFU.
        executed: FLOPs that the device executes, including recomputed blocks and attention scores.
        traffic: bytes moved by elementwise operations.
        seconds: estimated duration.
        copying: seconds of copying weights, overlapped with the compute or not.
    """

    model: float
    executed: Work
    traffic: float
    seconds: float
    copying: float


@dataclass(frozen=True)
class Step:
    """A micro-step of a model on a device."""

    model: StepModel
    load: BatchShape
    device: Device

    @cached_property
    def memory(self) -> StepMemory:
        """Peak memory."""
        return self.model.memory(self.load)

    @cached_property
    def cost(self) -> StepCost:
        """FLOPs and seconds."""
        added, model = self.model.added(self.load), self.model
        alone = self._forward(self.load).times(added.forwards)
        flops, main, main_traffic = self._pass(model.cost.routed(self.load, model.routes))
        _, extra, extra_traffic = self._pass(self.load)
        passes = 1 + added.passes
        executed = main + extra.times(added.passes) + alone + Work(added.flops)
        traffic = main_traffic + extra_traffic * added.passes + self._forward_traffic * added.forwards
        launching = self._launches * ((1 + self._recomputed / 3) * passes + added.forwards / 3)
        computing = max(self._seconds(executed, traffic), launching)
        copying = self._copying(2 * passes + added.forwards)
        seconds = max(computing, copying) if model.overlapped else computing + copying
        seconds += 2 * model.state_on_host_bytes / self.device.rates.transfer  # as if nothing of it were hidden
        return StepCost(flops, executed, traffic, seconds, copying)

    @property
    def forward_seconds(self) -> float:
        """Seconds of a forward pass without gradients."""
        return max(self._seconds(self._forward(self.load), self._forward_traffic), self._launches / 3)

    def _pass(self, load: BatchShape) -> tuple[float, Work, float]:
        """Forward and backward: FLOPs without and with recomputation, and bytes of elementwise operations."""
        model, share, forward = self.model, self._recomputed, self._forward(load)
        backward = model.cost.backward(load, model.adapters, full=model.is_full)
        blocks = model.cost.forward(load, model.adapters, blocks_only=True)
        again = blocks.times(share, 0.0 if model.keep_attention else share)
        flash = Work(0.0, (FLASH_BACKWARD - ATTENTION_BACKWARD) * forward.attention)
        moved = model.cost.activations_by_block(load, BYTES[model.dtype], model.adapters)
        traffic = sum(block.traffic for block in moved) * (3 + share)
        return forward.total + backward.total, forward + backward + again + flash, traffic

    def _forward(self, load: BatchShape) -> Work:
        return self.model.cost.forward(load, self.model.adapters)

    @property
    def _forward_traffic(self) -> float:
        cost = self.model.cost
        return cost.large * cost.activations(self.load, BYTES[self.model.dtype], self.model.adapters).traffic

    @property
    def _recomputed(self) -> float:
        """Share of the large blocks whose forward pass runs twice."""
        return sum(self.model.checkpointed) / max(self.model.cost.large, 1)

    def _copying(self, times: float) -> float:
        """Seconds of copying streamed blocks, which are gone through some times, except for those still in the slots
        at the turn."""
        moving = max(self.model.moving - SLOTS * self.model.group, 0)
        return times * moving * sum(self.model.blocks) / len(self.model.blocks) / self.device.rates.transfer

    def _seconds(self, work: Work, traffic: float) -> float:
        rates = self.device.rates
        speed = FLOAT32_SHARE if self.model.dtype == "fp32" and self.device.is_gpu else 1.0
        return (
            work.linear / (rates.matmul * speed) + work.attention / (rates.attention * speed) + traffic / rates.memory
        )

    @property
    def _launches(self) -> float:
        return len(self.model.cost.blocks) * LAUNCHES * (GPU_LAUNCH if self.device.is_gpu else CPU_LAUNCH)


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


def sent_bytes(model: StepModel, added: TechniqueCost, micro_steps: int) -> Sent:
    """What each process sends: DDP does so once in an optimizer step, FSDP2 in each micro-step, but for gradients that
    are kept whole.

    Args:
        added: what techniques add to a micro-step.
    """
    if not model.trains:
        return Sent()
    share = (model.processes - 1) / model.processes
    weights = sum(model.whole_blocks) + model.rest
    gradients = weights if model.is_full else model.trained_numbers * model.number_bytes
    reduced = added.parameters * BYTES["fp32"] + (0.0 if model.sharded and model.is_full else gradients)
    if not model.sharded:
        return Sent(reduced=2 * share * reduced)
    backward = 1 + added.passes
    times = backward + added.forwards + (backward if model.reshards else 0.0)
    scatters = 1 if model.whole_gradients else backward * micro_steps
    return Sent(2 * share * reduced, share * weights * times * micro_steps, share * weights * scatters * model.is_full)


def link_rate(device: Device, machines: int) -> float:
    """Bytes per second between devices, assumed: through the host's bus, and the network between machines."""
    return min(device.rates.transfer, NETWORK) if machines > 1 else device.rates.transfer
