"""Estimates the work and duration of a training step.

    seconds = products / matmul rate + attention / attention rate + elementwise bytes / memory rate

or the time to launch the operations, or to copy streamed weights, whichever is longest; on a CPU,
operations are launched and computed in turn. Waiting for data is excluded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from simpletuner.budget.device import Device
from simpletuner.budget.step_memory import StepMemory, StepModel
from simpletuner.config.schema import SLOTS
from simpletuner.config.speed import keeps_attention
from simpletuner.models.cost import (
    ATTENTION_BACKWARD,
    BYTES,
    FLASH_BACKWARD,
    BatchShape,
    Work,
)

# All-to-alls of a block with sequence parallelism in each pass: of queries, keys, values and the
# output.
EXCHANGES = 4

# Operations of a stock block, forward plus backward, and the seconds to launch one of them. The
# figures for a GPU are not measured.
LAUNCHES = 450
GPU_LAUNCH_SECONDS = 6e-6
CPU_LAUNCH_SECONDS = 8e-6
# Seconds of the host for a compiled block, forward plus backward.
COMPILED_BLOCK_SECONDS = 2.0e-3
# A backward pass has twice the operations of a forward pass, so both have those of three.
FORWARDS_OF_A_STEP = 3

FLOAT32_SHARE = 0.5  # rate of float32 matmuls with TF32, relative to bf16


@dataclass(frozen=True)
class StepCost:
    """Cost of one micro-batch, forward and backward.

    Attributes:
        model: FLOPs without recomputation, the basis of MFU.
        executed: FLOPs that the device executes, including recomputed blocks and attention scores.
        traffic: bytes moved by elementwise operations.
        seconds: estimated duration.
        computing, launching, copying: seconds of the device's kernels, of launching them on the
            host, and of copying weights, overlapped with compute or not.
    """

    model: float
    executed: Work
    traffic: float
    seconds: float
    computing: float
    launching: float
    copying: float


class PassCost(NamedTuple):
    """Cost of a forward and a backward pass.

    Attributes:
        flops: FLOPs without recomputation.
        executed: with recomputation.
        traffic: bytes moved by elementwise operations.
    """

    flops: float
    executed: Work
    traffic: float


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
        model = self.model
        added = model.added(self.load)
        # The step itself: its tokens may take the routes of TREAD.
        main = self._both_passes(model.cost.routed(self.load, model.routes))
        # What techniques add: whole passes, forward passes without gradients, their own modules.
        extra = self._both_passes(self.load)
        forward = self._forward(self.load).times(added.forwards)
        executed = main.executed + extra.executed.times(added.passes) + forward + Work(added.flops)
        traffic = (
            main.traffic + extra.traffic * added.passes + self._forward_traffic * added.forwards
        )

        passes = 1 + added.passes
        computing = self._kernel_seconds(executed, traffic)
        # Recomputed blocks launch the operations of their forward pass once more.
        forwards = 1 + (FORWARDS_OF_A_STEP - 1) * self._reached + self._recomputed
        launches_of_a_pass = self._launch_seconds * forwards / FORWARDS_OF_A_STEP
        launching = (
            launches_of_a_pass * passes
            + self._eager_launch_seconds * added.forwards / FORWARDS_OF_A_STEP
        )
        busy = self._busy_seconds(computing, launching)
        copying = self._copy_seconds(passes + added.forwards, backwards=passes)
        if model.config.offload.group_offload_use_stream:
            seconds = max(busy, copying)  # the shorter is hidden behind the longer
        else:
            seconds = busy + copying
        seconds += self.exchanged / self.device.rates.link  # blocks wait for their all-to-alls
        # Optimizer state comes and goes; assumes that nothing hides it.
        seconds += 2 * model.state_on_host_bytes / self.device.rates.transfer
        return StepCost(
            model=main.flops,
            executed=executed,
            traffic=traffic,
            seconds=seconds,
            computing=computing,
            launching=launching,
            copying=copying,
        )

    @property
    def free_samples(self) -> int:
        """Largest micro-batch that takes no longer, while a GPU is bound by kernel launches."""
        present = self.load.samples
        cost = self.cost
        if not self.device.is_gpu or cost.launching <= cost.copying:
            return present
        return max(int(present * cost.launching / cost.computing), present)

    @property
    def exchanged(self) -> float:
        """Bytes that a process sends within its sequence-parallel group."""
        model = self.model
        load = self.load
        sequence = model.config.launch.sequence_parallel_size
        tensor = load.samples * load.tokens * model.cost.hidden * BYTES[model.dtype]
        # A process has its share of the tokens with all heads, and keeps its share of the heads.
        sent = tensor / sequence * (sequence - 1) / sequence
        # Forward, backward, and once more the forward pass of recomputed blocks. Techniques add
        # whole passes.
        passes = (1 + self._reached + self._recomputed) * (1 + model.added(load).passes)
        return EXCHANGES * passes * model.cost.large * sent

    @property
    def forward_seconds(self) -> float:
        """Seconds of a forward pass without gradients, as in previews."""
        traffic = self._forward_traffic
        launching = self._eager_launch_seconds
        if self.model.config.validation.validation_torch_compile:
            traffic = self.model.cost.large * self.model.one_block(self.load).forward
            launching = self._launch_seconds
        computing = self._kernel_seconds(self._forward(self.load), traffic)
        return self._busy_seconds(computing, launching / FORWARDS_OF_A_STEP)

    def _both_passes(self, load: BatchShape) -> PassCost:
        """Cost of a forward and a backward pass.

        Sequence parallelism divides all of it. Text tokens and the output layer, which every
        process computes, are neglected.
        """
        model = self.model
        recomputed = self._recomputed
        forward = self._forward(load)
        backward = model.cost.backward(load, model.adapters, full=model.is_full)
        # Checkpointed blocks run forward again; selective checkpointing has kept their attention.
        blocks = model.cost.forward(load, model.adapters, blocks_only=True)
        recomputed_attention = 0.0 if keeps_attention(model.config.speed) else recomputed
        again = blocks.times(recomputed, recomputed_attention)
        # Flash kernels compute the scores again in the backward pass: executed, but not part of the
        # model's FLOPs.
        scores = forward.times(0.0, FLASH_BACKWARD - ATTENTION_BACKWARD)
        executed = forward + backward + again + scores

        activations = model.cost.activations_by_block(load, BYTES[model.dtype], model.adapters)
        traffic = 0.0
        states = zip(activations, model.reached, model.checkpointed, strict=True)
        for block, is_reached, is_checkpointed in states:
            traffic += block.forward
            if is_reached:
                traffic += block.backward
            if is_checkpointed:
                traffic += block.forward
        share = 1 / model.config.launch.sequence_parallel_size
        return PassCost(
            flops=share * (forward.total + backward.total),
            executed=executed.times(share),
            traffic=share * traffic,
        )

    def _forward(self, load: BatchShape) -> Work:
        return self.model.cost.forward(load, self.model.adapters)

    @property
    def _forward_traffic(self) -> float:
        """Bytes moved by the elementwise operations of stock blocks in a forward pass."""
        return self.model.cost.large * self.model.one_block(self.load).traffic

    @property
    def _recomputed(self) -> float:
        """Share of large blocks that are recomputed."""
        return sum(self.model.checkpointed) / max(self.model.cost.large, 1)

    @property
    def _reached(self) -> float:
        """Share of large blocks that the backward pass reaches."""
        return sum(self.model.reached) / max(self.model.cost.large, 1)

    def _busy_seconds(self, computing: float, launching: float) -> float:
        """Seconds of kernels and launches combined: overlapped on a GPU, in turn on a CPU."""
        return max(computing, launching) if self.device.is_gpu else computing + launching

    def _copy_seconds(self, forwards: float, *, backwards: float) -> float:
        """Seconds of copying streamed blocks in forward and backward passes.

        A backward pass, in which blocks are also recomputed, copies those that it reaches.
        """
        model = self.model
        # The next pass runs the other way: the blocks that are in the slots by then stay there.
        reused = SLOTS * model.config.offload.group_offload_blocks_per_group
        copied = 0.0
        for share, passes in ((1.0, forwards), (self._reached, backwards)):
            copied += passes * max(share * model.streamed_blocks - reused, 0)
        return copied * sum(model.blocks) / len(model.blocks) / self.device.rates.transfer

    def _kernel_seconds(self, work: Work, traffic: float) -> float:
        """Seconds of matmuls, attention and elementwise operations, one after the other."""
        rates = self.device.rates
        products = (
            work.linear / rates.matmul
            + work.attention / rates.attention
            + work.sparse / rates.sparse
        )
        # The rates of GPUs are those of 16-bit products; those of a CPU are of float32.
        if self.model.dtype == "fp32" and self.device.is_gpu:
            products /= FLOAT32_SHARE
        return products + traffic / rates.memory

    @property
    def _launch_seconds(self) -> float:
        """Seconds of launching a forward and a backward pass in training."""
        if not self.model.cost.compiled:
            return self._eager_launch_seconds
        return len(self.model.cost.blocks) * COMPILED_BLOCK_SECONDS

    @property
    def _eager_launch_seconds(self) -> float:
        """Seconds of launching a forward and a backward pass of stock blocks."""
        launch = GPU_LAUNCH_SECONDS if self.device.is_gpu else CPU_LAUNCH_SECONDS
        return len(self.model.cost.blocks) * LAUNCHES * launch
