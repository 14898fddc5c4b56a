"""Estimates the memory and the duration of a training step, and what processes send each other. Free of torch.

On the device, at the peak of a step:

    frozen weights (resident, or the slots they stream through, or with FSDP2 a share and the gathered blocks)
  + trained weights, gradients, optimizer state
  + inputs of checkpointed blocks, all saved activations of the others
  + the block whose backward pass runs

    seconds = products / matmul rate + attention / attention rate + elementwise bytes / memory rate

or the time to launch the operations, or to copy streamed weights, whichever is longest. It is for stock, uncompiled
models, and excludes waiting for data.

Ring algorithms of N processes send as little as possible: each sends (N - 1) / N of a tensor to gather it or to reduce
and scatter it, and twice that to reduce it on all (Patarasuk and Yuan, Journal of Parallel and Distributed Computing
69(2), 2009).
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Literal

from simpletuner.budget.device import Device
from simpletuner.config.optimizers import OPTIMIZERS, update_kernel
from simpletuner.config.schema import SLOTS, OptimizerName
from simpletuner.config.speed import checkpointed_blocks
from simpletuner.config.tread import Route
from simpletuner.models.cost import (
    ATTENTION_BACKWARD,
    BYTES,
    FLASH_BACKWARD,
    NO_ADAPTERS,
    Activations,
    Adapters,
    BatchShape,
    TransformerCost,
    Work,
)
from simpletuner.techniques.spec import TechniqueCost, TechniqueSpec

AVERAGE = 4.0  # bytes per number of the moving average: float32
# Bytes per number of the widest layer that quantised products add to the peak, as metered: float32 copies and sums.
PRODUCT = 4.5
# Blocks in FSDP2's buffers beside the one that computes. What was gathered for it is kept until the next arrives, in
# memory of another stream; gradients are copied to be summed (torch 2.13, `FSDPParamGroup.wait_for_unshard`).
GATHERED, SCATTERED = 2, 1
BUNDLE = 1 << 24  # numbers that an average is updated with at a time, unless one weight has more
SHARD = 5e9  # bytes of the files that a full model is saved in, each assembled in host memory
# Operations of a block in forward plus backward, and seconds to launch one.
LAUNCHES, GPU_LAUNCH, CPU_LAUNCH = 450, 6e-6, 12e-6
FLOAT32_SHARE = 0.5  # rate of float32 products with TF32, relative to bf16
NETWORK = 12.5e9  # bytes/s between machines, assumed: 100 Gbit/s


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the device at the peak of a training step.

    Attributes:
        weights: frozen weights.
        trained: trained weights, their gradients, optimizer state and moving average.
        inputs: activations kept for the backward pass of all blocks.
        block: the block whose backward pass runs.
        outside: activations outside the blocks.
        update: what the update of the weights needs beyond these activations, which it comes after.
    """

    weights: float
    trained: float
    inputs: float
    block: float
    outside: float
    update: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


@dataclass(frozen=True)
class AverageMemory:
    """Bytes of a moving average, on the device or on the host.

    Attributes:
        kept: the average itself, throughout the run.
        updating: float32 copies of some weights, during its update.
        waiting: the trained weights, while the average replaces them for previews and saving.
    """

    kept: float
    updating: float
    waiting: float


@dataclass(frozen=True)
class StepModel:
    """A transformer and the settings that determine memory and time of its steps.

    Attributes:
        cost: of the transformer.
        dtype: dtype of the transformer: bf16, fp16 or fp32.
        number_bytes: bytes per trained number.
        state_bytes: bytes of optimizer state per trained number.
        adapters: the LoRA; none for a full fine-tune.
        optimizer: updates all weights at once on a GPU, if it can; None updates one at a time.
        checkpoint_interval, kept_blocks: every n-th block is checkpointed but for some; None without checkpointing.
        keep_attention: checkpointing keeps the self-attention's output.
        streamed: frozen blocks stream through slots on the device.
        residents: number of blocks that stay on the device.
        group: blocks per slot.
        overlapped: copies of streamed blocks run beside the compute.
        inputs_on_host: block inputs are offloaded to host memory.
        quantised: bytes per weight of the blocks' linear layers; 0 if not quantised.
        released: gradients are freed as they arise, at most those of one block at a time.
        state_on_host: optimizer state is on the device only while a weight is updated.
        multiplies: they multiply in these bits (`quantized_matmul`).
        averaged: where a moving average of the trained weights is kept, `device` or `host`; empty without one.
        routes: windows of blocks that some tokens skip, in training only.
        techniques: techniques in use, which may have their own weights and compute.
        trains: whether anything is trained; a model without adapters is trained as a whole.
        processes: how many train together, each on its device.
        sharded: they share the weights among them (FSDP2), and of trained ones gradients, optimizer state and average;
            adapters are whole in each.
        reshards: a block's gathered weights are given up after its forward pass.
        whole_gradients: gradients of sharded weights are whole until the last micro-step.
        from_base: blocks wait on the host until the adapters have been computed from them.
    """

    cost: TransformerCost
    dtype: str
    number_bytes: float
    state_bytes: float
    adapters: Adapters = NO_ADAPTERS
    optimizer: OptimizerName | None = None
    checkpoint_interval: int | None = 1
    kept_blocks: int = 0
    keep_attention: bool = False
    streamed: bool = False
    residents: int = 0
    group: int = 1
    overlapped: bool = True
    inputs_on_host: bool = False
    quantised: float = 0.0
    released: bool = False
    state_on_host: bool = False
    multiplies: bool = False
    averaged: Literal["", "device", "host"] = ""
    routes: tuple[Route, ...] = ()
    techniques: tuple[TechniqueSpec, ...] = ()
    trains: bool = True
    processes: int = 1
    sharded: bool = False
    reshards: bool = True
    from_base: bool = False
    whole_gradients: bool = False

    @property
    def is_full(self) -> bool:
        return self.trains and not self.adapters.modules

    @property
    def trained_shares(self) -> int:
        """Among how many processes trained weights are divided."""
        return self.processes if self.sharded and self.is_full else 1

    @property
    def trained_numbers(self) -> int:
        return self.cost.parameters if self.is_full else self.cost.adapter_parameters(self.adapters)

    @property
    def largest_weight(self) -> int:
        """Numbers of the largest weight."""
        return max(map(math.prod, self.cost.shapes.values()))

    @cached_property
    def rest(self) -> float:
        """Bytes of the weights outside the blocks."""
        return self.cost.rest_bytes(self.dtype)

    @cached_property
    def blocks(self) -> list[float]:
        """Bytes of each block's weights, as they wait and stream."""
        return self.cost.block_bytes(self.dtype, quantised=self.quantised)

    @cached_property
    def whole_blocks(self) -> list[float]:
        """The same, not quantised."""
        return self.cost.block_bytes(self.dtype, quantised=0.0)

    @property
    def moving(self) -> int:
        """How many blocks stream; 0 where all stay."""
        return max(len(self.blocks) - self.residents, 0) if self.streamed else 0

    @cached_property
    def update_bytes(self) -> float:
        """Bytes per trained number that the optimizer allocates on a GPU while it updates all weights at once; 0 if it
        allocates those of one weight at a time."""
        if self.optimizer is None:
            return 0.0
        weights = len(self.cost.shapes) if self.is_full else 2 * len(self.adapters.modules)
        numbers, sharded = self.trained_numbers, self.trained_shares > 1
        kernel = update_kernel(self.optimizer, "cuda", weights, numbers, sharded=sharded, triton=True)
        return OPTIMIZERS[self.optimizer].temporaries * self.number_bytes if kernel in (None, "foreach") else 0.0

    @cached_property
    def trained_bytes(self) -> float:
        """Bytes of trained weights, gradients, optimizer state, and a moving average on the device."""
        average = AVERAGE if self.averaged == "device" else 0.0
        # Left out: temporary tensors of the update of one weight. Those of all weights together count in `StepMemory`.
        kept = self.trained_numbers * (self.number_bytes + self.state_bytes + average) / self.trained_shares
        return kept - self.state_on_host_bytes + self.gradient_bytes

    @property
    def state_on_host_bytes(self) -> float:
        """Bytes of optimizer state in host memory: all but that of one weight that is updated, one whose state arrives,
        and those, one more than `SLOTS`, whose state leaves."""
        here = self.trained_numbers - (SLOTS + 3) * self.largest_weight
        return max(here, 0) * self.state_bytes if self.state_on_host else 0.0

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients of trained weights; of released ones, those that the largest block has at once."""
        if self.released:
            return max(self.whole_blocks)
        return self.trained_numbers * self.number_bytes / (1 if self.whole_gradients else self.trained_shares)

    def average_memory(self, where: Literal["device", "host"]) -> AverageMemory:
        """Memory of the moving average on one side; 0 if it is kept on the other."""
        count = self.trained_numbers / self.trained_shares if self.averaged == where else 0.0
        bundle = min(count, max(BUNDLE, self.largest_weight))
        return AverageMemory(AVERAGE * count, AVERAGE * bundle, self.number_bytes * count)

    @property
    def saving_bytes(self) -> float:
        """Host memory for saving: a shard of a full model, or a LoRA in both formats; without the average."""
        weights = self.trained_numbers * self.number_bytes
        return min(weights, SHARD) if self.is_full else 2 * weights

    @property
    def copied_bytes(self) -> float:
        """Host memory for a copy of all that is saved: weights as trained and as published, optimizer state, EMA."""
        copies = 2 * self.number_bytes + self.state_bytes + (AVERAGE + self.number_bytes if self.averaged else 0.0)
        return self.trained_numbers * copies

    @cached_property
    def frozen_bytes(self) -> float:
        """Bytes of frozen weights on the device during a step, and of what FSDP2 has gathered."""
        if self.is_full:
            return self.gathered_bytes
        if self.sharded:
            return (self.rest + sum(self.blocks)) / self.processes + self.gathered_bytes
        slots = min(self.residents, len(self.blocks)) + SLOTS * self.group
        # A slot is as large as the largest block.
        here = min(sum(self.blocks), max(self.blocks) * slots) if self.streamed else sum(self.blocks)
        return self.rest + here

    @property
    def gathered_bytes(self) -> float:
        """Bytes of whole weights and gradients that FSDP2 has on a device: what is outside the blocks, and some of
        them."""
        if not self.sharded:
            return 0.0
        buffer = max(self.whole_blocks)
        gradients = self.rest + buffer + SCATTERED * buffer if self.is_full else 0.0
        return self.rest + (buffer if self.reshards else sum(self.whole_blocks)) + GATHERED * buffer + gradients

    @property
    def streamed_bytes(self) -> float:
        """Bytes of offloaded frozen weights, in host memory or on disk."""
        return sum(self.blocks) * self.moving / len(self.blocks)

    @property
    def shared_bytes(self) -> float:
        """Host memory of a machine for the blocks that FSDP2 will split among its processes."""
        return sum(self.whole_blocks) if self.sharded else 0.0

    @property
    def passing_bytes(self) -> float:
        """Host memory of a process while it loads the transformer, besides streamed and shared weights: what is outside
        the blocks, and the blocks in work, as they are read and as they are packed."""
        waiting = sum(self.blocks) - self.streamed_bytes if self.from_base else 0.0
        return self.rest + 2 * max(self.whole_blocks) * (self.group if self.streamed else 1) + waiting

    def memory(self, load: BatchShape) -> StepMemory:
        """Peak memory of a step with one micro-batch."""
        blocks, chosen, added = self.activations(load), self.checkpointed, self.added(load)
        # Of offloaded inputs, a few are still leaving or back already; the largest ones are assumed.
        inputs = self._held(load)[-SLOTS:] if self.inputs_on_host else self._held(load)
        whole = [block.saved + block.held for block, is_one in zip(blocks, chosen, strict=True) if not is_one]
        attention = [block.attention for block, is_one in zip(blocks, chosen, strict=True) if is_one]
        product = PRODUCT * self.cost.widest(load) if self.multiplies else 0.0
        backward = StepMemory(
            weights=self.frozen_bytes,
            # Modules of techniques are trained in float32: weight and gradient.
            trained=self.trained_bytes + added.parameters * (2 * BYTES["fp32"] + self.state_bytes),
            inputs=added.held + sum(inputs) + sum(whole) + (sum(attention) if self.keep_attention else 0.0),
            # A checkpointed block saves its activations again when it is recomputed.
            block=product + max(block.transient + (block.saved if any(chosen) else 0.0) for block in blocks),
            outside=self._activations(load).outside,
        )
        temporary = self.update_bytes * (self.trained_numbers / self.trained_shares + added.parameters)
        # Activations are free again by then, so only what exceeds them raises the peak.
        return replace(backward, update=max(0.0, temporary - backward.inputs - backward.block - backward.outside))

    def added(self, load: BatchShape) -> TechniqueCost:
        """What all techniques together add to a micro-batch."""
        costs = [astuple(technique.cost(self.cost, load)) for technique in self.techniques]
        return TechniqueCost(*map(sum, zip(*costs, strict=True)))

    def activations(self, load: BatchShape) -> list[Activations]:
        """Activations of each large block in a training step, after routes, which extra passes do not have."""
        routes = () if self.added(load).passes else self.routes
        return self.cost.activations_by_block(self.cost.routed(load, routes), BYTES[self.dtype], self.adapters)

    @property
    def checkpointed(self) -> list[bool]:
        """Whether each large block is checkpointed."""
        count = len(self.cost.blocks)
        return checkpointed_blocks(count, self.checkpoint_interval, self.kept_blocks)[count - self.cost.large :]

    def inputs_on_host_bytes(self, load: BatchShape) -> float:
        """Bytes of block inputs in host memory at the end of the forward pass."""
        return sum(self._held(load)[:-SLOTS]) if self.inputs_on_host else 0.0

    def sampling_bytes(self, load: BatchShape) -> float:
        """Bytes of activations of a forward pass without gradients."""
        block = self._activations(load)
        return block.sampling + block.held + block.outside

    def _held(self, load: BatchShape) -> list[float]:
        """Bytes of the inputs of the checkpointed blocks, the smallest first."""
        blocks = zip(self.activations(load), self.checkpointed, strict=True)
        return sorted(block.held for block, is_one in blocks if is_one)

    def _activations(self, load: BatchShape) -> Activations:
        return self.cost.activations(load, BYTES[self.dtype], self.adapters)


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
        # `LAUNCHES` counts forward and backward; a forward pass is a third of them.
        launching = self._launches * ((1 + self._recomputed / 3) * passes + added.forwards / 3)
        computing = max(self._seconds(executed, traffic), launching)
        # A block is needed in the forward and again in the backward pass.
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
        # Recomputed: all of a checkpointed block but the attention that was kept.
        again = blocks.times(share, 0.0 if model.keep_attention else share)
        # Scores that a flash kernel recomputes are executed, but not part of the model's FLOPs.
        flash = forward.times(0.0, FLASH_BACKWARD - ATTENTION_BACKWARD)
        moved = model.cost.activations_by_block(load, BYTES[model.dtype], model.adapters)
        # 1 forward, 2 backward (see `Activations.traffic`), and the recomputed share
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
        attention = (work.attention + work.sparse) / (rates.attention * speed)
        return work.linear / (rates.matmul * speed) + attention + traffic / rates.memory

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
    # Weights that are given up after the forward pass are gathered again for the backward pass.
    times = backward + added.forwards + (backward if model.reshards else 0.0)
    scatters = 1 if model.whole_gradients else backward * micro_steps
    return Sent(2 * share * reduced, share * weights * times * micro_steps, share * weights * scatters * model.is_full)


def link_rate(device: Device, machines: int) -> float:
    """Bytes per second between devices, assumed: through the host's bus, and the network between machines."""
    return min(device.rates.transfer, NETWORK) if machines > 1 else device.rates.transfer
