"""Estimates the memory and duration of a training step, and the communication between processes.

On the device, at the peak of a step:

    frozen weights (resident, or the slots they stream through, or with FSDP2 a share and the
    gathered blocks)
  + trained weights, gradients, optimizer state
  + inputs of checkpointed blocks, all saved activations of the others
  + the block whose backward pass runs

    seconds = products / matmul rate + attention / attention rate + elementwise bytes / memory rate

or the time to launch the operations, or to copy streamed weights, whichever is longest; on a CPU,
operations are launched and computed in turn. Waiting for data is excluded.

Ring algorithms of N processes are bandwidth-optimal: each process sends (N - 1) / N of a tensor in
an all-gather or reduce-scatter, and twice that in an all-reduce (Patarasuk and Yuan, Journal of
Parallel and Distributed Computing 69(2), 2009).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Literal

from simpletuner.budget.device import Device
from simpletuner.config.launch import LaunchConfig
from simpletuner.config.optimizers import (
    OPTIMIZERS,
    optimizer_name,
    trained_precision,
    update_kernel,
    widens_second_moment,
)
from simpletuner.config.precision import quantised_bytes, transformer_dtype
from simpletuner.config.schema import SLOTS, OptimizerName, RunConfig
from simpletuner.config.speed import checkpointed_blocks, keeps_attention
from simpletuner.config.techniques.tread import Route
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
from simpletuner.planning.techniques.spec import TechniqueCost, TechniqueSpec

AVERAGE = 4.0  # bytes per number of the moving average: float32
# Bytes per number of the widest layer that quantised matmuls add to the peak (measured): float32
# copies and sums.
PRODUCT = 4.5
# Blocks in FSDP2's buffers besides the one that computes. Gathered weights are kept until the next
# block's arrive, in memory of another stream; gradients are copied to be reduced (torch 2.13,
# `FSDPParamGroup.wait_for_unshard`).
GATHERED = 2
SCATTERED = 1
# Sequence parallelism: copies of a tensor in an all-to-all, and bytes per number of the hidden
# states of all tokens around the output layer, which every process computes for all tokens
# (measured).
EXCHANGED = 4
GATHERED_TOKENS = 14
# All-to-alls in a block's forward pass, and in its backward pass: queries, keys, values and the
# output.
EXCHANGES = 4
BUNDLE = 1 << 24  # numbers per update of a moving average, unless one weight has more
SHARD = 5e9  # bytes per file of a saved full model, each assembled in host memory
# Operations of a stock block in forward plus backward, and seconds to launch one; and the host's
# seconds per compiled block. The figures for a GPU are not measured.
LAUNCHES = 450
GPU_LAUNCH = 6e-6
CPU_LAUNCH = 8e-6
COMPILED_LAUNCHES = 2.0e-3
FLOAT32_SHARE = 0.5  # rate of float32 products with TF32, relative to bf16


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the device at the peak of a training step.

    Attributes:
        weights: frozen weights.
        trained: trained weights, their gradients, optimizer state and moving average.
        inputs: activations kept for the backward pass of all blocks.
        block: the block whose backward pass runs.
        outside: activations outside the blocks.
        update: memory of the optimizer update in excess of these activations, which are free by
            then.
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
        kept: the average, throughout the run.
        updating: float32 copies of some weights, during the update.
        waiting: the trained weights, while the average replaces them for previews and saving.
    """

    kept: float
    updating: float
    waiting: float


@dataclass(frozen=True)
class ModelStates:
    """Memory of a transformer's "model states" (ZeRO, arXiv:1910.02054): weights and, if trained,
    gradients, optimizer state and a moving average.

    Attributes:
        cost: cost of the transformer.
        adapters: the LoRA; none for a full fine-tune.
        trains: whether weights are trained; without adapters, all of them.
    """

    cost: TransformerCost
    config: RunConfig
    adapters: Adapters = NO_ADAPTERS
    trains: bool = True

    @cached_property
    def trained_dtype(self) -> str:
        """Dtype of the trained weights: bf16 or fp32."""
        return trained_precision(self.config.optimizer, self.config.precision)

    @cached_property
    def dtype(self) -> str:
        """Dtype of the transformer: bf16, fp16 or fp32. A full fine-tune computes in the dtype of
        its weights.
        """
        is_lora = self.config.model.model_type == "lora"
        return transformer_dtype(self.config.precision) if is_lora else self.trained_dtype

    @property
    def number_bytes(self) -> int:
        """Bytes per trained number."""
        return BYTES[self.trained_dtype]

    @cached_property
    def optimizer(self) -> OptimizerName:
        return optimizer_name(self.config.optimizer, self.config.precision.mixed_precision)

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per trained number."""
        spec = OPTIMIZERS[self.optimizer]
        number = self.number_bytes
        size = number if spec.moment_bytes is None else spec.moment_bytes
        if self.trained_dtype != "bf16":
            return spec.moments * size
        # Kahan summation needs one more tensor; the second moment may be float32.
        compensation = 0.0 if spec.rounds_randomly else number
        widened = widens_second_moment(self.config.optimizer, self.config.precision.mixed_precision)
        return spec.moments * size + compensation + (BYTES["fp32"] - size if widened else 0.0)

    @property
    def is_full(self) -> bool:
        return self.trains and not self.adapters.modules

    @property
    def sharded(self) -> bool:
        return self.config.launch.sharers > 1

    @property
    def trained_shares(self) -> int:
        """Number of processes that trained weights are sharded across."""
        return self.config.launch.sharers if self.is_full else 1

    @property
    def trained_numbers(self) -> int:
        return self.cost.parameters if self.is_full else self.cost.adapter_parameters(self.adapters)

    @cached_property
    def rest(self) -> float:
        """Bytes of the weights outside the blocks."""
        return self.cost.rest_bytes(self.dtype)

    @cached_property
    def blocks(self) -> list[float]:
        """Bytes of each block's weights, as they wait and stream."""
        quantised = quantised_bytes(self.config.precision.base_model_precision)
        return self.cost.block_bytes(self.dtype, quantised=quantised)

    @cached_property
    def whole_blocks(self) -> list[float]:
        """Bytes of each block's weights before they are quantised."""
        return self.cost.block_bytes(self.dtype, quantised=0.0)

    @property
    def moving(self) -> int:
        """Number of streamed blocks; 0 without streaming."""
        residents = self.config.offload.group_offload_resident_blocks
        return (
            max(len(self.blocks) - residents, 0) if self.config.offload.enable_group_offload else 0
        )

    @cached_property
    def update_bytes(self) -> float:
        """Temporary bytes per trained number of an update of all weights at once on a GPU; 0 if
        weights are updated one at a time."""
        weights = len(self.cost.shapes) if self.is_full else 2 * len(self.adapters.modules)
        numbers = self.trained_numbers
        sharded = self.trained_shares > 1
        kernel = update_kernel(
            self.optimizer, "cuda", weights, numbers, sharded=sharded, triton=True
        )
        return (
            OPTIMIZERS[self.optimizer].temporaries * self.number_bytes
            if kernel in (None, "foreach")
            else 0.0
        )

    @cached_property
    def trained_bytes(self) -> float:
        """Bytes of trained weights, gradients, optimizer state, and a moving average on the
        device.
        """
        # Without temporaries of the update: those of all weights at once count in `StepMemory`,
        # those of one are small.
        kept = self.trained_numbers * (self.number_bytes + self.state_bytes) / self.trained_shares
        average = self.average_memory("device").kept
        return kept + average - self.state_on_host_bytes + self.gradient_bytes

    @property
    def state_on_host_bytes(self) -> float:
        """Bytes of optimizer state in host memory: all but that of one weight that is updated, one
        whose state arrives, and those, one more than `SLOTS`, whose state leaves."""
        here = self.trained_numbers - (SLOTS + 3) * self.cost.largest_weight
        return (
            max(here, 0) * self.state_bytes if self.config.offload.offload_optimizer_state else 0.0
        )

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients of trained weights; if released, of the largest block only."""
        if self.config.optimizer.optimizer_release_gradients:
            return max(self.whole_blocks)
        return self.trained_numbers * self.number_bytes / self.trained_shares

    @property
    def average_bytes(self) -> float:
        """Bytes per trained number of a moving average in a checkpoint, as state and as weights; 0
        without one.
        """
        return AVERAGE + self.number_bytes if self.config.ema.use_ema else 0.0

    def average_memory(self, where: Literal["device", "host"]) -> AverageMemory:
        """Memory of the moving average on the device or host; 0 if it is kept on the other."""
        ema = self.config.ema
        is_there = ema.use_ema and ema.is_on_host == (where == "host")
        count = self.trained_numbers / self.trained_shares if is_there else 0.0
        bundle = min(count, max(BUNDLE, self.cost.largest_weight))
        return AverageMemory(AVERAGE * count, AVERAGE * bundle, self.number_bytes * count)

    @property
    def saving_bytes(self) -> float:
        """Host memory for saving: a shard of a full model, or a LoRA in both formats; without the
        average.
        """
        weights = self.trained_numbers * self.number_bytes
        return min(weights, SHARD) if self.is_full else 2 * weights

    @cached_property
    def frozen_bytes(self) -> float:
        """Bytes of frozen weights on the device during a step, including weights gathered by
        FSDP2.
        """
        if self.is_full:
            return self.gathered_bytes
        if self.sharded:
            return (self.rest + sum(self.blocks)) / self.config.launch.sharers + self.gathered_bytes
        if not self.config.offload.enable_group_offload:
            return self.rest + sum(self.blocks)
        # A slot is as large as the largest block.
        residents = min(self.config.offload.group_offload_resident_blocks, len(self.blocks))
        slots = residents + SLOTS * self.config.offload.group_offload_blocks_per_group
        return self.rest + min(sum(self.blocks), max(self.blocks) * slots)

    @property
    def gathered_bytes(self) -> float:
        """Bytes of unsharded weights and gradients that FSDP2 holds: of some blocks, and of weights
        outside them.
        """
        if not self.sharded:
            return 0.0
        buffer = max(self.whole_blocks)
        gradients = self.rest + buffer + SCATTERED * buffer if self.is_full else 0.0
        weights = (
            buffer if self.config.launch.fsdp_reshard_after_forward else sum(self.whole_blocks)
        )
        return self.rest + weights + GATHERED * buffer + gradients

    @property
    def streamed_bytes(self) -> float:
        """Bytes of offloaded frozen weights, in host memory or on disk."""
        return sum(self.blocks) * self.moving / len(self.blocks)

    @property
    def passing_bytes(self) -> float:
        """Host memory of a process during loading, without streamed and shared weights: weights
        outside the blocks, and the current blocks as read and as packed."""
        # Resident blocks wait on the host if the adapter is computed from them.
        from_base = self.adapters.modules and self.config.lora.starts_from_base
        waiting = sum(self.blocks) - self.streamed_bytes if from_base else 0.0
        group = (
            self.config.offload.group_offload_blocks_per_group
            if self.config.offload.enable_group_offload
            else 1
        )
        return self.rest + 2 * max(self.whole_blocks) * group + waiting


@dataclass(frozen=True)
class StepModel(ModelStates):
    """A transformer with its activations in a step.

    Attributes:
        techniques: techniques in use, which may have their own weights and compute.
    """

    techniques: tuple[TechniqueSpec, ...] = ()

    @property
    def routes(self) -> list[Route]:
        """TREAD routes, in training only."""
        return [route for technique in self.techniques for route in technique.routes]

    def memory(self, load: BatchShape) -> StepMemory:
        """Peak memory of a step with one micro-batch."""
        blocks = self.activations(load)
        chosen = self.checkpointed
        added = self.added(load)
        # A few offloaded inputs are still leaving or already back; assume the largest.
        inputs = (
            self._held(load)[-SLOTS:]
            if self.config.offload.offload_block_inputs
            else self._held(load)
        )
        whole = [
            block.saved + block.held
            for block, is_one in zip(blocks, chosen, strict=True)
            if not is_one
        ]
        keeps = keeps_attention(self.config.speed)
        attention = [
            block.attention
            for block, is_one in zip(blocks, chosen, strict=True)
            if is_one and keeps
        ]
        sequence = self.config.launch.sequence_parallel_size
        multiplies = self.config.precision.quantized_matmul
        product = PRODUCT * self.cost.widest(load) / sequence if multiplies else 0.0
        around = (
            GATHERED_TOKENS * load.samples * load.tokens * self.cost.hidden if sequence > 1 else 0.0
        )
        backward = StepMemory(
            weights=self.frozen_bytes,
            # Modules of techniques are trained in float32: weight and gradient.
            trained=self.trained_bytes + added.parameters * (2 * BYTES["fp32"] + self.state_bytes),
            inputs=added.held + sum(inputs) + sum(whole) + sum(attention),
            # Recomputing a checkpointed block saves its activations again.
            block=product
            + max(
                *(block.transient + (block.saved if any(chosen) else 0.0) for block in blocks),
                around,
            ),
            outside=self.one_block(load).outside,
        )
        temporary = self.update_bytes * (
            self.trained_numbers / self.trained_shares + added.parameters
        )
        # Activations are free by then, so only the excess raises the peak.
        return replace(
            backward,
            update=max(0.0, temporary - backward.inputs - backward.block - backward.outside),
        )

    def added(self, load: BatchShape) -> TechniqueCost:
        """The total cost that techniques add to a micro-batch."""
        costs = [astuple(technique.cost(self.cost, load)) for technique in self.techniques]
        return TechniqueCost(*map(sum, zip(*costs, strict=True)))

    def activations(self, load: BatchShape) -> list[Activations]:
        """Activations of each large block in a training step, with routes, which extra passes do
        not use.
        """
        routes = () if self.added(load).passes else self.routes
        blocks = self.cost.activations_by_block(
            self.cost.routed(load, routes), BYTES[self.dtype], self.adapters
        )
        sequence = self.config.launch.sequence_parallel_size
        if sequence == 1:
            return blocks
        shares = [_share(block, sequence) for block in blocks]
        return [
            replace(shares[0], held=blocks[0].held),
            *shares[1:],
        ]  # the first block's input has all tokens

    @property
    def checkpointed(self) -> list[bool]:
        """Whether each large block is checkpointed."""
        count = len(self.cost.blocks)
        precision = self.config.precision
        kept = precision.gradient_checkpointing_kept_blocks
        return checkpointed_blocks(count, precision.checkpoint_interval, kept)[
            count - self.cost.large :
        ]

    def inputs_on_host_bytes(self, load: BatchShape) -> float:
        """Bytes of block inputs in host memory at the end of the forward pass."""
        return sum(self._held(load)[:-SLOTS]) if self.config.offload.offload_block_inputs else 0.0

    def sampling_bytes(self, load: BatchShape) -> float:
        """Bytes of activations of a forward pass without gradients."""
        block = self.one_block(load)
        return block.sampling + block.held + block.outside

    def _held(self, load: BatchShape) -> list[float]:
        """Bytes of the inputs of the checkpointed blocks, the smallest first."""
        blocks = zip(self.activations(load), self.checkpointed, strict=True)
        return sorted(block.held for block, is_one in blocks if is_one)

    def one_block(self, load: BatchShape) -> Activations:
        """Activations of a large block that processes all tokens."""
        return self.cost.activations(load, BYTES[self.dtype], self.adapters)


def _share(whole: Activations, count: int) -> Activations:
    """The activations of a block per process of a sequence-parallel group of `count`."""
    exchanging = whole.transient + EXCHANGED * whole.held
    share = {
        "held": whole.held,
        "saved": whole.saved,
        "attention": whole.attention,
        "transient": exchanging,
    }
    return replace(whole, **{name: size / count for name, size in share.items()})


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
        added = self.model.added(self.load)
        model = self.model
        alone = self._forward(self.load).times(added.forwards)
        flops, main, main_traffic = self._pass(model.cost.routed(self.load, model.routes))
        _, extra, extra_traffic = self._pass(self.load)
        passes = 1 + added.passes
        executed = main + extra.times(added.passes) + alone + Work(added.flops)
        traffic = (
            main_traffic + extra_traffic * added.passes + self._forward_traffic * added.forwards
        )
        # `LAUNCHES` counts forward and backward; the forward pass is a third.
        launching = (
            self._launches * (1 + self._recomputed / 3) * passes
            + self._eager_launches * added.forwards / 3
        )
        computing = self._seconds(executed, traffic)
        busy = self._together(computing, launching)
        # A block is copied for the forward pass and again for the backward pass, in which it is
        # also recomputed.
        copying = self._copying(2 * passes + added.forwards)
        seconds = (
            max(busy, copying) if model.config.offload.group_offload_use_stream else busy + copying
        )
        seconds += self.exchanged / self.device.rates.link  # blocks wait for their all-to-alls
        seconds += 2 * model.state_on_host_bytes / self.device.rates.transfer  # assumes no overlap
        return StepCost(flops, executed, traffic, seconds, computing, launching, copying)

    def _together(self, computing: float, launching: float) -> float:
        """Seconds of kernels and launches combined: sequential on a CPU, overlapped on a GPU."""
        return max(computing, launching) if self.device.is_gpu else computing + launching

    @property
    def free_samples(self) -> int:
        """Largest micro-batch that takes no longer, while a GPU is bound by kernel launches."""
        waits = self.device.is_gpu and self.cost.launching > self.cost.copying
        most = self.load.samples * self.cost.launching / self.cost.computing
        return max(int(most), self.load.samples) if waits else self.load.samples

    @property
    def exchanged(self) -> float:
        """Bytes that a process sends within its sequence-parallel group."""
        model = self.model
        load = self.load
        sequence = model.config.launch.sequence_parallel_size
        tensor = load.samples * load.tokens * model.cost.hidden * BYTES[model.dtype]
        # A process has its share of the tokens with all heads. It keeps of these its share of the
        # heads.
        sent = tensor / sequence * (sequence - 1) / sequence
        # Forward, backward, and the forward pass of recomputed blocks again; techniques add whole
        # passes.
        passes = (2 + self._recomputed) * (1 + model.added(load).passes)
        return EXCHANGES * passes * model.cost.large * sent

    @property
    def forward_seconds(self) -> float:
        """Seconds of a forward pass without gradients, as of previews."""
        traffic = self._forward_traffic
        launches = self._eager_launches
        if self.model.config.validation.validation_torch_compile:
            traffic = self.model.cost.large * self.model.one_block(self.load).forward
            launches = self._launches
        return self._together(self._seconds(self._forward(self.load), traffic), launches / 3)

    def _pass(self, load: BatchShape) -> tuple[float, Work, float]:
        """Forward and backward: FLOPs without and with recomputation, and bytes of elementwise
        operations.

        Sequence parallelism divides all of it, except for text tokens and the output layer, which
        are neglected.
        """
        model = self.model
        share = self._recomputed
        forward = self._forward(load)
        backward = model.cost.backward(load, model.adapters, full=model.is_full)
        blocks = model.cost.forward(load, model.adapters, blocks_only=True)
        # Recomputed: a checkpointed block without the kept attention.
        again = blocks.times(share, 0.0 if keeps_attention(model.config.speed) else share)
        # Scores recomputed by a flash kernel are executed but not part of the model's FLOPs.
        flash = forward.times(0.0, FLASH_BACKWARD - ATTENTION_BACKWARD)
        moved = model.cost.activations_by_block(load, BYTES[model.dtype], model.adapters)
        traffic = sum(block.forward * (1 + share) + block.backward for block in moved)
        executed = forward + backward + again + flash
        part = 1 / model.config.launch.sequence_parallel_size
        return part * (forward.total + backward.total), executed.times(part), part * traffic

    def _forward(self, load: BatchShape) -> Work:
        return self.model.cost.forward(load, self.model.adapters)

    @property
    def _forward_traffic(self) -> float:
        return self.model.cost.large * self.model.one_block(self.load).traffic

    @property
    def _recomputed(self) -> float:
        """Share of large blocks that are recomputed."""
        return sum(self.model.checkpointed) / max(self.model.cost.large, 1)

    def _copying(self, times: float) -> float:
        """Seconds of copying streamed blocks in `times` passes, without blocks still in the slots
        at a turn.
        """
        moving = max(
            self.model.moving - SLOTS * self.model.config.offload.group_offload_blocks_per_group, 0
        )
        return (
            times
            * moving
            * sum(self.model.blocks)
            / len(self.model.blocks)
            / self.device.rates.transfer
        )

    def _seconds(self, work: Work, traffic: float) -> float:
        rates = self.device.rates
        speed = FLOAT32_SHARE if self.model.dtype == "fp32" and self.device.is_gpu else 1.0
        products = (
            work.linear / rates.matmul
            + work.attention / rates.attention
            + work.sparse / rates.sparse
        )
        return products / speed + traffic / rates.memory

    @property
    def _launches(self) -> float:
        """Seconds of launching a forward and a backward pass in training."""
        return (
            len(self.model.cost.blocks) * COMPILED_LAUNCHES
            if self.model.cost.compiled
            else self._eager_launches
        )

    @property
    def _eager_launches(self) -> float:
        """Seconds of launching both passes of uncompiled blocks."""
        return (
            len(self.model.cost.blocks)
            * LAUNCHES
            * (GPU_LAUNCH if self.device.is_gpu else CPU_LAUNCH)
        )


@dataclass(frozen=True)
class Sent:
    """Bytes that each process sends in an optimizer step.

    Attributes:
        reduced: all-reduce of gradients (DDP), including adapters and techniques with FSDP2.
        gathered: all-gather of weights (FSDP2).
        scattered: reduce-scatter of gradients (FSDP2, full fine-tunes).
        exchanged: all-to-all of tokens and heads (sequence parallelism), which blocks wait for.
    """

    reduced: float = 0.0
    gathered: float = 0.0
    scattered: float = 0.0
    exchanged: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


def sent_bytes(model: StepModel, added: TechniqueCost) -> Sent:
    """Bytes that each process sends: with DDP once per optimizer step, with FSDP2 in each
    micro-step.

    Args:
        added: cost that techniques add to a micro-step.
    """
    if not model.trains:
        return Sent()
    launch = model.config.launch
    share = (launch.num_processes - 1) / launch.num_processes  # that a ring sends of a tensor
    weights = sum(model.whole_blocks) + model.rest
    reduced: float = added.parameters * BYTES["fp32"]
    if not model.is_full:
        reduced += model.trained_numbers * model.number_bytes
    elif not model.sharded:
        reduced += weights
    if not model.sharded:
        return Sent(reduced=2 * share * reduced)

    micro_steps = model.config.schedule.gradient_accumulation_steps
    backward = 1 + added.passes
    gathered = backward + added.forwards
    if launch.fsdp_reshard_after_forward:
        gathered += backward
    # The gradients of a full fine-tune are reduced in every backward pass. A LoRA is whole in every
    # process.
    scattered = backward if model.is_full else 0.0
    return Sent(
        reduced=2 * share * reduced,
        gathered=share * weights * gathered * micro_steps,
        scattered=share * weights * scattered * micro_steps,
    )


def exchange_seconds(sent: Sent, device: Device, launch: LaunchConfig) -> float:
    """Seconds of communication over NVLink or the host's bus, and between machines over one network
    card each.

    Excludes the all-to-alls of sequence parallelism, which count in the time of micro-steps.
    """
    slowest = device.rates.link
    if launch.num_machines > 1:
        network = launch.network_gbit / 8 * 1e9
        slowest = min(slowest, network)
    return (sent.total - sent.exchanged) / slowest
