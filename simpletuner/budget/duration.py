"""Estimates the duration of a step from its FLOPs and bytes and a device's rates. Free of torch.

    seconds = products / matmul rate + attention / attention rate + elementwise bytes / memory rate

or the time to launch the operations, or to copy streamed weights, whichever is longest. It is for stock, uncompiled
models, and excludes waiting for data.
"""

from __future__ import annotations

from dataclasses import dataclass

from simpletuner.budget.device import Device
from simpletuner.budget.estimate import TrainingSetup, are_checkpointed, state_on_host_bytes, technique_cost
from simpletuner.config.schema import SLOTS
from simpletuner.models.cost import ATTENTION_BACKWARD, BYTES, FLASH_BACKWARD, BatchShape, TransformerCost, Work

# Operations of a block in forward plus backward, and seconds to launch one.
LAUNCHES, GPU_LAUNCH, CPU_LAUNCH = 450, 6e-6, 12e-6
FLOAT32_SHARE = 0.5  # rate of float32 products with TF32, relative to bf16


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


def step_cost(cost: TransformerCost, setup: TrainingSetup, load: BatchShape, device: Device) -> StepCost:
    """FLOPs and seconds of one micro-batch on a device."""
    added = technique_cost(cost, setup, load)
    alone = cost.forward(load, setup.adapters).times(added.forwards)
    alone_traffic = _forward_traffic(cost, setup, load) * added.forwards
    routed = cost.routed(load, setup.routes)
    model, main, main_traffic = _pass(cost, setup, routed)
    _, extra, extra_traffic = _pass(cost, setup, load)
    passes = 1 + added.passes
    executed = main + extra.times(added.passes) + alone + Work(added.flops)
    traffic = main_traffic + extra_traffic * added.passes + alone_traffic
    launching = _launches(cost, device) * ((1 + recomputed_share(cost, setup) / 3) * passes + added.forwards / 3)
    computing = max(_seconds(executed, traffic, setup, device), launching)
    copying = copy_seconds(cost, setup, device, 2 * passes + added.forwards)
    seconds = max(computing, copying) if setup.overlapped else computing + copying
    seconds += 2 * state_on_host_bytes(cost, setup) / device.rates.transfer  # as if nothing of it were hidden
    return StepCost(model, executed, traffic, seconds, copying)


def _pass(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> tuple[float, Work, float]:
    """Forward and backward: FLOPs without and with recomputation, and bytes of elementwise operations."""
    forward = cost.forward(load, setup.adapters)
    backward = cost.backward(load, setup.adapters, full=setup.is_full)
    share = recomputed_share(cost, setup)
    again = cost.forward(load, setup.adapters, blocks_only=True).times(share, 0.0 if setup.keep_attention else share)
    flash = Work(0.0, (FLASH_BACKWARD - ATTENTION_BACKWARD) * forward.attention)
    blocks = cost.activations_by_block(load, BYTES[setup.dtype], setup.adapters)
    traffic = sum(block.traffic for block in blocks) * (3 + share)
    return forward.total + backward.total, forward + backward + again + flash, traffic


def recomputed_share(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Share of the large blocks whose forward pass runs twice."""
    return sum(are_checkpointed(cost, setup)) / max(cost.large, 1)


def forward_seconds(cost: TransformerCost, setup: TrainingSetup, load: BatchShape, device: Device) -> float:
    """Seconds of a forward pass without gradients."""
    traffic = _forward_traffic(cost, setup, load)
    return max(_seconds(cost.forward(load, setup.adapters), traffic, setup, device), _launches(cost, device) / 3)


def copy_seconds(cost: TransformerCost, setup: TrainingSetup, device: Device, times: float = 2.0) -> float:
    """Seconds of copying streamed blocks in a step, except for those still in the slots at the turn.

    Args:
        times: how often the blocks are gone through: twice in a forward and backward pass.
    """
    if not setup.streamed or setup.is_full:
        return 0.0
    blocks = cost.block_bytes(setup.dtype, quantised=setup.quantised)
    moving = max(len(blocks) - setup.residents - SLOTS * setup.group, 0)
    return times * moving * sum(blocks) / len(blocks) / device.rates.transfer


def _forward_traffic(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> float:
    return cost.large * cost.activations(load, BYTES[setup.dtype], setup.adapters).traffic


def _seconds(work: Work, traffic: float, setup: TrainingSetup, device: Device) -> float:
    rates = device.rates
    speed = FLOAT32_SHARE if setup.dtype == "fp32" and device.is_gpu else 1.0
    return work.linear / (rates.matmul * speed) + work.attention / (rates.attention * speed) + traffic / rates.memory


def _launches(cost: TransformerCost, device: Device) -> float:
    return len(cost.blocks) * LAUNCHES * (GPU_LAUNCH if device.is_gpu else CPU_LAUNCH)
