"""The memory model: how many bytes a training step takes on the device and on the host. Free of torch.

On the device, at the worst moment of a step:

    frozen weights (resident, or the slots they stream through)
  + trained weights, gradients, optimizer state
  + the inputs of the blocks that are checkpointed, everything of those that are not
  + one block while its backward pass runs
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from simpletuner.config.optimizers import OPTIMIZERS
from simpletuner.config.schema import SLOTS, OptimizerName
from simpletuner.config.tread import Route
from simpletuner.models.cost import BYTES, Activations, Adapters, BatchShape, TransformerCost
from simpletuner.techniques.spec import TechniqueCost, TechniqueSpec

AVERAGE = 4.0  # bytes per number: float32
SHARD = 10e9  # a full model is written in files of this size, each gathered in host memory


@dataclass(frozen=True)
class TrainingSetup:
    """What of a configuration the memory of a step depends on.

    Attributes:
        dtype: of the transformer: bf16, fp16 or fp32.
        adapters: the LoRA; of rank 0 for a full fine-tune.
        trained_bytes: of one trained number.
        state_bytes: of the optimizer's state per trained number.
        checkpoint_interval: every n-th block is checkpointed; None is no checkpointing.
        keep_attention: checkpointing keeps the self-attention's output.
        streamed: frozen blocks come through slots.
        residents: so many of them stay on the device.
        group: blocks that come together.
        overlapped: copies of streamed blocks run beside the compute.
        inputs_on_host: block inputs wait in host memory.
        quantised: bytes per weight of the blocks' linear layers, 0 where they are not quantised.
        averaged: where a moving average of the trained weights is kept, `device` or `host`; empty without one.
        routes: windows of blocks that some tokens pass by; in training alone.
        techniques: what may have weights and arithmetic of its own.
    """

    dtype: str
    adapters: Adapters
    trained_bytes: float
    state_bytes: float
    checkpoint_interval: int | None = 1
    keep_attention: bool = False
    streamed: bool = False
    residents: int = 0
    group: int = 1
    overlapped: bool = True
    inputs_on_host: bool = False
    quantised: float = 0.0
    averaged: Literal["", "device", "host"] = ""
    routes: tuple[Route, ...] = ()
    techniques: tuple[TechniqueSpec, ...] = ()

    @property
    def is_full(self) -> bool:
        return not self.adapters.modules


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the device at the worst moment of a training step, by what they are.

    Attributes:
        weights: frozen ones.
        trained: trained weights, their gradients, the optimizer's state, an average.
        inputs: what is kept for the backward pass of blocks that are still to come.
        block: the block at work.
        outside: what belongs to no block.
    """

    weights: float
    trained: float
    inputs: float
    block: float
    outside: float

    @property
    def total(self) -> float:
        return sum(getattr(self, each.name) for each in fields(self))


def optimizer_state_bytes(name: OptimizerName, trained_bytes: float, *, compensated: bool) -> float:
    """Bytes of state per trained number.

    Args:
        compensated: it trains bf16 weights with compensated sums, which are one tensor more.
    """
    spec = OPTIMIZERS[name]
    size = trained_bytes if spec.moment_bytes is None else spec.moment_bytes
    return spec.moments * size + compensated * trained_bytes


def trained_numbers(cost: TransformerCost, setup: TrainingSetup) -> int:
    return cost.parameters if setup.is_full else cost.adapter_parameters(setup.adapters)


def trained_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Weights that are trained, their gradients, the optimizer's state, and an average on the device."""
    average = AVERAGE if setup.averaged == "device" else 0.0
    # The update of a full model works on copies of a few tensors at a time; those of a LoRA are small.
    return trained_numbers(cost, setup) * (2 * setup.trained_bytes + setup.state_bytes + average)


@dataclass(frozen=True)
class AverageMemory:
    """Bytes of a moving average where it lives.

    Attributes:
        kept: the average, all the time.
        updating: float32 copies of the weights, between two steps.
        waiting: the trained weights, while previews and files take the average.
        saving: the copy that goes into a checkpoint.
    """

    kept: float
    updating: float
    waiting: float
    saving: float


def average_memory(cost: TransformerCost, setup: TrainingSetup, place: Literal["device", "host"]) -> AverageMemory:
    """What the average takes on the device or on the host: nothing where it is not."""
    count = trained_numbers(cost, setup) if setup.averaged == place else 0
    return AverageMemory(AVERAGE * count, AVERAGE * count, setup.trained_bytes * count, AVERAGE * count)


def saving_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """On the host: a shard of a full model, or a LoRA in its two forms, beside an average's copy from the device."""
    weights = trained_numbers(cost, setup) * setup.trained_bytes
    return min(weights, SHARD) if setup.is_full else 2 * weights


def frozen_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Frozen weights on the device while a step runs."""
    if setup.is_full:
        return 0.0
    blocks = cost.block_bytes(setup.dtype, quantised=setup.quantised)
    rest = cost.rest_bytes(setup.dtype)
    if not setup.streamed:
        return rest + sum(blocks)
    largest = max(blocks)
    return rest + min(sum(blocks), largest * (min(setup.residents, len(blocks)) + SLOTS * setup.group))


def streamed_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Frozen weights that wait in host memory, or on a disk: those of the blocks that do not stay on the device."""
    if setup.is_full or not setup.streamed:
        return 0.0
    blocks = cost.block_bytes(setup.dtype, quantised=setup.quantised)
    return sum(blocks) * max(len(blocks) - setup.residents, 0) / len(blocks)


def step_memory(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> StepMemory:
    """The worst moment of a step with one micro-batch."""
    blocks = activations_of(cost, setup, load)
    chosen = are_checkpointed(cost, setup)
    checkpointed = [block for block, is_one in zip(blocks, chosen, strict=True) if is_one]
    plain = [block for block, is_one in zip(blocks, chosen, strict=True) if not is_one]
    held = sorted(block.held for block in checkpointed)
    inputs = sum(held[-SLOTS:] if setup.inputs_on_host else held)
    if setup.keep_attention:
        inputs += sum(block.attention for block in checkpointed)
    recomputed = any(chosen)
    added = technique_cost(cost, setup, load)
    return StepMemory(
        weights=frozen_bytes(cost, setup),
        trained=trained_bytes(cost, setup) + added.parameters * (2 * BYTES["fp32"] + setup.state_bytes),
        inputs=added.held + inputs + sum(block.held + block.saved for block in plain),
        block=max(block.transient + (block.saved if recomputed else 0.0) for block in blocks),
        outside=cost.activations(load, BYTES[setup.dtype], setup.adapters).outside,
    )


def technique_cost(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> TechniqueCost:
    """What all techniques together add to one micro-batch."""
    costs = [technique.cost(cost, load) for technique in setup.techniques]
    return TechniqueCost(
        parameters=sum(each.parameters for each in costs),
        held=sum(each.held for each in costs),
        flops=sum(each.flops for each in costs),
    )


def activations_of(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> list[Activations]:
    """Of each large block in a training step, with the tokens that routes leave it."""
    return cost.activations_by_block(cost.routed(load, setup.routes), BYTES[setup.dtype], setup.adapters)


def are_checkpointed(cost: TransformerCost, setup: TrainingSetup) -> list[bool]:
    """Whether it is, of each large block."""
    interval, first = setup.checkpoint_interval, len(cost.blocks) - cost.large
    return [interval is not None and index % interval == 0 for index in range(first, len(cost.blocks))]


def split_blocks(cost: TransformerCost, setup: TrainingSetup) -> tuple[int, int]:
    """How many of the large blocks are checkpointed, and how many are not."""
    chosen = sum(are_checkpointed(cost, setup))
    return chosen, cost.large - chosen


def inputs_on_host_bytes(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> float:
    """Block inputs in host memory at the end of a forward pass."""
    if not setup.inputs_on_host:
        return 0.0
    blocks = zip(activations_of(cost, setup, load), are_checkpointed(cost, setup), strict=True)
    return sum(sorted(block.held for block, is_one in blocks if is_one)[:-SLOTS])


def sampling_bytes(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> float:
    """A forward pass without gradients, beside weights."""
    bytes_of = cost.activations(load, BYTES[setup.dtype], setup.adapters)
    return bytes_of.sampling + bytes_of.held + bytes_of.outside
