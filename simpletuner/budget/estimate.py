"""Estimates the memory of a training step on the device and on the host. Free of torch.

On the device, at the peak of a step:

    frozen weights (resident, or the slots they stream through, or with FSDP2 a share and the gathered blocks)
  + trained weights, gradients, optimizer state
  + inputs of checkpointed blocks, all saved activations of the others
  + the block whose backward pass runs
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

from simpletuner.config.optimizers import OPTIMIZERS, update_kernel
from simpletuner.config.schema import SLOTS, OptimizerName
from simpletuner.config.speed import checkpointed_blocks
from simpletuner.config.tread import Route
from simpletuner.models.cost import BYTES, Activations, Adapters, BatchShape, TransformerCost
from simpletuner.techniques.spec import TechniqueCost, TechniqueSpec

AVERAGE = 4.0  # bytes per number of the moving average: float32
# Bytes per number of the widest layer that quantised products add to the peak, as metered: float32 copies and sums.
PRODUCT = 4.5
# Blocks in FSDP2's buffers beside the one that computes. What was gathered for it is kept until the next arrives, in
# memory of another stream; gradients are copied to be summed (torch 2.13, `FSDPParamGroup.wait_for_unshard`).
GATHERED, SCATTERED = 2, 1
BUNDLE = 1 << 24  # numbers that an average is updated with at a time, unless one weight has more
SHARD = 5e9  # bytes of the files that a full model is saved in, each assembled in host memory


@dataclass(frozen=True)
class TrainingSetup:
    """The settings that determine memory and time of a step.

    Attributes:
        dtype: dtype of the transformer: bf16, fp16 or fp32.
        adapters: the LoRA; none for a full fine-tune.
        trained_bytes: bytes per trained number.
        state_bytes: bytes of optimizer state per trained number.
        update_bytes: bytes per trained number that the optimizer allocates while it updates all weights at once.
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

    dtype: str
    adapters: Adapters
    trained_bytes: float
    state_bytes: float
    update_bytes: float = 0.0
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
    def trained_shares(self) -> int:
        """Among how many processes trained weights are divided."""
        return self.processes if self.sharded and self.is_full else 1

    @property
    def is_full(self) -> bool:
        return self.trains and not self.adapters.modules


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
        return sum(getattr(self, each.name) for each in fields(self))


def optimizer_state_bytes(
    name: OptimizerName, trained_bytes: float, *, compensated: bool, widened: bool = False
) -> float:
    """Bytes of optimizer state per trained number.

    Args:
        compensated: bf16 weights are trained, whose compensated summation needs one more tensor.
        widened: their second moment is float32.
    """
    spec = OPTIMIZERS[name]
    compensated = compensated and not spec.rounds_randomly
    size = trained_bytes if spec.moment_bytes is None else spec.moment_bytes
    return spec.moments * size + compensated * trained_bytes + widened * (BYTES["fp32"] - size)


def trained_numbers(cost: TransformerCost, setup: TrainingSetup) -> int:
    return cost.parameters if setup.is_full else cost.adapter_parameters(setup.adapters)


def update_bytes(cost: TransformerCost, setup: TrainingSetup, name: OptimizerName) -> float:
    """Bytes per trained number that an optimizer allocates on a GPU while it updates all weights at once; 0 if it
    allocates those of one weight at a time."""
    weights = len(cost.shapes) if setup.is_full else 2 * len(setup.adapters.modules)
    numbers, sharded = trained_numbers(cost, setup), setup.trained_shares > 1
    kernel = update_kernel(name, "cuda", weights, numbers, sharded=sharded, triton=True)
    return OPTIMIZERS[name].temporaries * setup.trained_bytes if kernel in (None, "foreach") else 0.0


def trained_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Bytes of trained weights, gradients, optimizer state, and a moving average on the device."""
    average = AVERAGE if setup.averaged == "device" else 0.0
    # Left out: temporary tensors of the update of one weight. Those of all weights together count in `StepMemory`.
    kept = trained_numbers(cost, setup) * (setup.trained_bytes + setup.state_bytes + average) / setup.trained_shares
    return kept - state_on_host_bytes(cost, setup) + gradient_bytes(cost, setup)


def state_on_host_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Bytes of optimizer state in host memory: all but that of one weight that is updated, one whose state arrives, and
    those, one more than `SLOTS`, whose state leaves."""
    if not setup.state_on_host:
        return 0.0
    largest = max(map(math.prod, cost.shapes.values()))
    return max(trained_numbers(cost, setup) - (SLOTS + 3) * largest, 0) * setup.state_bytes


def gradient_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Bytes of the gradients of trained weights; of released ones, those that the largest block has at once."""
    if setup.released:
        return max(cost.block_bytes(setup.dtype, quantised=0.0))
    shares = 1 if setup.whole_gradients else setup.trained_shares
    return trained_numbers(cost, setup) * setup.trained_bytes / shares


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


def average_memory(cost: TransformerCost, setup: TrainingSetup, place: Literal["device", "host"]) -> AverageMemory:
    """Memory of the average at `place`; 0 if it is kept elsewhere."""
    count = trained_numbers(cost, setup) / setup.trained_shares if setup.averaged == place else 0.0
    bundle = min(count, max(BUNDLE, *map(math.prod, cost.shapes.values())))
    return AverageMemory(AVERAGE * count, AVERAGE * bundle, setup.trained_bytes * count)


def saving_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Host memory for saving: a shard of a full model, or a LoRA in both formats; without the average."""
    weights = trained_numbers(cost, setup) * setup.trained_bytes
    return min(weights, SHARD) if setup.is_full else 2 * weights


def frozen_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Bytes of frozen weights on the device during a step, and of what FSDP2 has gathered."""
    if setup.is_full:
        return gathered_bytes(cost, setup)
    blocks = cost.block_bytes(setup.dtype, quantised=setup.quantised)
    rest = cost.rest_bytes(setup.dtype)
    if setup.sharded:
        return (rest + sum(blocks)) / setup.processes + gathered_bytes(cost, setup)
    if not setup.streamed:
        return rest + sum(blocks)
    largest = max(blocks)
    return rest + min(sum(blocks), largest * (min(setup.residents, len(blocks)) + SLOTS * setup.group))


def gathered_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Bytes of whole weights and gradients that FSDP2 has on a device: what is outside the blocks, and some of them."""
    if not setup.sharded:
        return 0.0
    blocks, rest = cost.block_bytes(setup.dtype, quantised=0.0), cost.rest_bytes(setup.dtype)
    one, buffer = rest + max(blocks), max(blocks)
    gradients = one + SCATTERED * buffer if setup.is_full else 0.0
    return (one if setup.reshards else rest + sum(blocks)) + GATHERED * buffer + gradients


def streamed_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Bytes of offloaded frozen weights, in host memory or on disk."""
    if setup.is_full or not setup.streamed:
        return 0.0
    blocks = cost.block_bytes(setup.dtype, quantised=setup.quantised)
    return sum(blocks) * max(len(blocks) - setup.residents, 0) / len(blocks)


def shared_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Host memory of a machine for the blocks that FSDP2 will split among its processes."""
    return sum(cost.block_bytes(setup.dtype, quantised=0.0)) if setup.sharded else 0.0


def passing_bytes(cost: TransformerCost, setup: TrainingSetup) -> float:
    """Host memory of a process while it loads the transformer, besides streamed and shared weights: what is outside the
    blocks, and the blocks in work, as they are read and as they are packed."""
    passing = 2 * max(cost.block_bytes(setup.dtype, quantised=0.0)) * (setup.group if setup.streamed else 1)
    if setup.from_base:
        passing += sum(cost.block_bytes(setup.dtype, quantised=setup.quantised)) - streamed_bytes(cost, setup)
    return passing + cost.rest_bytes(setup.dtype)


def step_memory(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> StepMemory:
    """Peak memory of a step with one micro-batch."""
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
    product = PRODUCT * cost.widest(load) if setup.multiplies else 0.0
    backward = StepMemory(
        weights=frozen_bytes(cost, setup),
        trained=trained_bytes(cost, setup) + added.parameters * (2 * BYTES["fp32"] + setup.state_bytes),
        inputs=added.held + inputs + sum(block.held + block.saved for block in plain),
        block=product + max(block.transient + (block.saved if recomputed else 0.0) for block in blocks),
        outside=cost.activations(load, BYTES[setup.dtype], setup.adapters).outside,
    )
    temporary = setup.update_bytes * (trained_numbers(cost, setup) / setup.trained_shares + added.parameters)
    return replace(backward, update=max(0.0, temporary - backward.inputs - backward.block - backward.outside))


def technique_cost(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> TechniqueCost:
    """What all techniques together add to a micro-batch."""
    costs = [technique.cost(cost, load) for technique in setup.techniques]
    return TechniqueCost(
        parameters=sum(each.parameters for each in costs),
        held=sum(each.held for each in costs),
        flops=sum(each.flops for each in costs),
        forwards=sum(each.forwards for each in costs),
        passes=sum(each.passes for each in costs),
    )


def activations_of(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> list[Activations]:
    """Activations of each large block in a training step, after routes, which extra passes do not have."""
    routes = () if technique_cost(cost, setup, load).passes else setup.routes
    return cost.activations_by_block(cost.routed(load, routes), BYTES[setup.dtype], setup.adapters)


def are_checkpointed(cost: TransformerCost, setup: TrainingSetup) -> list[bool]:
    """Whether each large block is checkpointed."""
    blocks = len(cost.blocks)
    return checkpointed_blocks(blocks, setup.checkpoint_interval, setup.kept_blocks)[blocks - cost.large :]


def inputs_on_host_bytes(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> float:
    """Bytes of block inputs in host memory at the end of the forward pass."""
    if not setup.inputs_on_host:
        return 0.0
    blocks = zip(activations_of(cost, setup, load), are_checkpointed(cost, setup), strict=True)
    return sum(sorted(block.held for block, is_one in blocks if is_one)[:-SLOTS])


def sampling_bytes(cost: TransformerCost, setup: TrainingSetup, load: BatchShape) -> float:
    """Bytes of activations of a forward pass without gradients."""
    bytes_of = cost.activations(load, BYTES[setup.dtype], setup.adapters)
    return bytes_of.sampling + bytes_of.held + bytes_of.outside
