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
from typing import Literal, NamedTuple

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

AVERAGE_BYTES = 4.0  # per number of a moving average: float32
# Numbers that a moving average updates at once, as float32 copies; one weight may have more.
AVERAGE_BUNDLE = 1 << 24
SAVED_FILE_BYTES = 5e9  # per file of a saved full model, each assembled in host memory

# Quantised matmuls add this many bytes per number of the widest layer to the peak: float32 copies
# and sums (measured).
QUANTISED_PRODUCT_BYTES = 4.5

# Blocks in FSDP2's buffers besides the one that computes. The weights of a block are kept until
# those of the next arrive, since they are gathered in another stream; gradients are copied once to
# be reduced (torch 2.13, `FSDPParamGroup.wait_for_unshard`).
GATHERED_BLOCKS = 2
SCATTERED_BLOCKS = 1

# A block with sequence parallelism exchanges queries, keys, values and the output, once in the
# forward pass and once in the backward pass. Each all-to-all holds four copies of its tensor.
EXCHANGES = 4
EXCHANGE_COPIES = 4
# Every process computes the output layer for all tokens: bytes per number of the hidden states
# (measured).
ALL_TOKENS_BYTES = 14

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
        kept: the average itself, throughout the run.
        updating: float32 copies of some weights, during an update of the average.
        waiting: the trained weights, while the average replaces them for previews and saving.
    """

    kept: float
    updating: float
    waiting: float


@dataclass(frozen=True)
class ModelStates:
    """Memory of a transformer's "model states", in the sense of ZeRO (arXiv:1910.02054).

    They are the weights and, in training, gradients, optimizer state and a moving average.

    Attributes:
        cost: cost of the transformer.
        adapters: the LoRA; none for a full fine-tune.
        trains: whether weights are trained; without adapters, all of them are.
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
        """Dtype in which the transformer computes: bf16, fp16 or fp32."""
        if self.config.model.model_type == "lora":
            return transformer_dtype(self.config.precision)
        # A full fine-tune computes in the dtype of its weights.
        return self.trained_dtype

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
        moment = self.number_bytes if spec.moment_bytes is None else spec.moment_bytes
        size = spec.moments * moment
        if self.trained_dtype != "bf16":
            return size
        if not spec.rounds_randomly:
            size += self.number_bytes  # Kahan summation: the lost low bits of each weight
        if widens_second_moment(self.config.optimizer, self.config.precision.mixed_precision):
            size += BYTES["fp32"] - moment
        return size

    @property
    def is_full(self) -> bool:
        """Whether this is a full fine-tune."""
        return self.trains and not self.adapters.modules

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards the weights."""
        return self.config.launch.sharers > 1

    @property
    def trained_shares(self) -> int:
        """Number of processes that trained weights are sharded across."""
        return self.config.launch.sharers if self.is_full else 1

    @property
    def trained_numbers(self) -> int:
        return self.cost.parameters if self.is_full else self.cost.adapter_parameters(self.adapters)

    @cached_property
    def rest_bytes(self) -> float:
        """Bytes of the weights outside the blocks."""
        return self.cost.rest_bytes(self.dtype)

    @cached_property
    def blocks(self) -> list[float]:
        """Bytes of each block's weights, as they wait and stream."""
        quantised = quantised_bytes(self.config.precision.base_model_precision)
        return self.cost.block_bytes(self.dtype, quantised=quantised)

    @cached_property
    def unquantised_blocks(self) -> list[float]:
        """Bytes of each block's weights before they are quantised."""
        return self.cost.block_bytes(self.dtype, quantised=0.0)

    @property
    def streamed_blocks(self) -> int:
        """Number of blocks that stream through the device; 0 without group offload."""
        if not self.config.offload.enable_group_offload:
            return 0
        return max(len(self.blocks) - self.config.offload.group_offload_resident_blocks, 0)

    @cached_property
    def update_bytes(self) -> float:
        """Temporary bytes per trained number while a GPU updates all weights at once.

        0 if the kernel updates one weight at a time.
        """
        matrices_of_adapters = 2 * len(self.adapters.modules)
        kernel = update_kernel(
            self.optimizer,
            device="cuda",
            weights=len(self.cost.shapes) if self.is_full else matrices_of_adapters,
            numbers=self.trained_numbers,
            sharded=self.trained_shares > 1,
            triton=True,
        )
        # None is the only kernel of an optimizer, which updates all weights at once too.
        if kernel not in (None, "foreach"):
            return 0.0
        return OPTIMIZERS[self.optimizer].temporaries * self.number_bytes

    @cached_property
    def trained_bytes(self) -> float:
        """Bytes on the device of trained weights, gradients, optimizer state and moving average.

        The temporaries of an update are left out: those of all weights at once count in
        `StepMemory`, those of a single weight are small.
        """
        weights_and_state = (
            self.trained_numbers * (self.number_bytes + self.state_bytes) / self.trained_shares
        )
        average = self.average_memory("device").kept
        return weights_and_state + average - self.state_on_host_bytes + self.gradient_bytes

    @property
    def state_on_host_bytes(self) -> float:
        """Bytes of optimizer state in host memory; 0 without `offload_optimizer_state`."""
        if not self.config.offload.offload_optimizer_state:
            return 0.0
        # At a time the device holds the state of one weight that is updated, of one that arrives,
        # and of SLOTS + 1 that leave. Assume the largest weight for all of them.
        on_device = (SLOTS + 3) * self.cost.largest_weight
        return max(self.trained_numbers - on_device, 0) * self.state_bytes

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients of trained weights."""
        if self.config.optimizer.optimizer_release_gradients:
            return max(self.unquantised_blocks)  # each block's are freed once it is updated
        return self.trained_numbers * self.number_bytes / self.trained_shares

    @property
    def average_bytes(self) -> float:
        """Bytes per trained number of a moving average in a checkpoint; 0 without one."""
        if not self.config.ema.use_ema:
            return 0.0
        return AVERAGE_BYTES + self.number_bytes  # as state to resume from, and as weights to use

    def average_memory(self, where: Literal["device", "host"]) -> AverageMemory:
        """Memory of the moving average on the device or the host; 0 if it is kept elsewhere."""
        ema = self.config.ema
        home = "host" if ema.is_on_host else "device"
        if not ema.use_ema or home != where:
            return AverageMemory(kept=0.0, updating=0.0, waiting=0.0)
        numbers = self.trained_numbers / self.trained_shares
        bundle = min(numbers, max(AVERAGE_BUNDLE, self.cost.largest_weight))
        return AverageMemory(
            kept=AVERAGE_BYTES * numbers,
            updating=AVERAGE_BYTES * bundle,
            waiting=self.number_bytes * numbers,
        )

    @property
    def saving_bytes(self) -> float:
        """Host memory for saving a checkpoint, without the average."""
        weights = self.trained_numbers * self.number_bytes
        if self.is_full:
            return min(weights, SAVED_FILE_BYTES)  # one file at a time
        return 2 * weights  # a LoRA is small, and is saved in two formats

    @cached_property
    def frozen_bytes(self) -> float:
        """Bytes of frozen weights on the device during a step, with those gathered by FSDP2."""
        if self.is_full:
            return self.gathered_bytes
        weights = self.rest_bytes + sum(self.blocks)
        if self.is_sharded:
            return weights / self.config.launch.sharers + self.gathered_bytes
        offload = self.config.offload
        if not offload.enable_group_offload:
            return weights
        # A slot has room for the largest block.
        residents = min(offload.group_offload_resident_blocks, len(self.blocks))
        slots = residents + SLOTS * offload.group_offload_blocks_per_group
        return self.rest_bytes + min(sum(self.blocks), max(self.blocks) * slots)

    @property
    def gathered_bytes(self) -> float:
        """Bytes of whole weights and gradients that FSDP2 holds at the peak; 0 without FSDP2."""
        if not self.is_sharded:
            return 0.0
        block = max(self.unquantised_blocks)
        # Without resharding, every block stays whole from the forward to the backward pass.
        computing = block
        if not self.config.launch.fsdp_reshard_after_forward:
            computing = sum(self.unquantised_blocks)
        gradients = 0.0
        if self.is_full:
            gradients = self.rest_bytes + block + SCATTERED_BLOCKS * block
        return self.rest_bytes + computing + GATHERED_BLOCKS * block + gradients

    @property
    def streamed_bytes(self) -> float:
        """Bytes of offloaded frozen weights, in host memory or on disk."""
        return sum(self.blocks) * self.streamed_blocks / len(self.blocks)

    @property
    def passing_bytes(self) -> float:
        """Host memory of a process while it loads weights, without streamed and shared ones."""
        blocks_at_once = 1
        if self.config.offload.enable_group_offload:
            blocks_at_once = self.config.offload.group_offload_blocks_per_group
        # A block is on the host twice: as read, and as packed.
        passing = self.rest_bytes + 2 * max(self.unquantised_blocks) * blocks_at_once
        if self.adapters.modules and self.config.lora.starts_from_base:
            # Resident blocks wait too, since the adapter is computed from them.
            passing += sum(self.blocks) - self.streamed_bytes
        return passing


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
        added = self.added(load)
        # A technique's module is trained in float32: weight, gradient and optimizer state.
        technique_bytes = 2 * BYTES["fp32"] + self.state_bytes
        backward = StepMemory(
            weights=self.frozen_bytes,
            trained=self.trained_bytes + added.parameters * technique_bytes,
            inputs=added.held + self._kept_bytes(load),
            block=self._computing_bytes(load),
            outside=self.one_block(load).outside,
        )
        updated_numbers = self.trained_numbers / self.trained_shares + added.parameters
        # The update reuses the memory of the activations, which are free by then: only what it
        # needs in excess raises the peak.
        excess = (
            self.update_bytes * updated_numbers
            - backward.inputs
            - backward.block
            - backward.outside
        )
        return replace(backward, update=max(0.0, excess))

    def _kept_bytes(self, load: BatchShape) -> float:
        """Bytes of activations that all blocks keep from the forward to the backward pass."""
        inputs = self._checkpointed_inputs(load)
        if self.config.offload.offload_block_inputs:
            # A few are still leaving or already back; assume the largest.
            inputs = inputs[-SLOTS:]
        keeps = keeps_attention(self.config.speed)
        saved = []
        attention = []
        blocks = zip(self.activations(load), self.reached, self.checkpointed, strict=True)
        for block, is_reached, is_checkpointed in blocks:
            if is_reached and not is_checkpointed:
                saved.append(block.saved + block.held)
            elif is_reached and keeps:
                attention.append(block.attention)
        return sum(inputs) + sum(saved) + sum(attention)

    def _computing_bytes(self, load: BatchShape) -> float:
        """Bytes of the most expensive moment: one block's backward pass, or the output layer."""
        sequence = self.config.launch.sequence_parallel_size
        recomputes = any(self.checkpointed)
        moments = []
        for block in self.activations(load):
            # Recomputing a checkpointed block saves its activations again.
            recomputed = block.saved if recomputes else 0.0
            moments.append(block.transient + recomputed)
        if sequence > 1:
            hidden_numbers = load.samples * load.tokens * self.cost.hidden
            moments.append(ALL_TOKENS_BYTES * hidden_numbers)
        product = 0.0
        if self.config.precision.quantized_matmul:
            product = QUANTISED_PRODUCT_BYTES * self.cost.widest(load) / sequence
        return product + max(moments)

    def added(self, load: BatchShape) -> TechniqueCost:
        """The total cost that techniques add to a micro-batch."""
        costs = [technique.cost(self.cost, load) for technique in self.techniques]
        return TechniqueCost(
            parameters=sum(cost.parameters for cost in costs),
            held=sum(cost.held for cost in costs),
            flops=sum(cost.flops for cost in costs),
            forwards=sum(cost.forwards for cost in costs),
            passes=sum(cost.passes for cost in costs),
        )

    def activations(self, load: BatchShape) -> list[Activations]:
        """Activations of each large block in a training step."""
        # The extra passes of techniques take no routes, so the peak is that of all tokens.
        routes = () if self.added(load).passes else self.routes
        routed = self.cost.routed(load, routes)
        blocks = self.cost.activations_by_block(routed, BYTES[self.dtype], self.adapters)
        sequence = self.config.launch.sequence_parallel_size
        if sequence == 1:
            return blocks
        shares = [_share_of_process(block, sequence) for block in blocks]
        # The first block's input has all tokens; they are split inside it.
        shares[0] = replace(shares[0], held=blocks[0].held)
        return shares

    @cached_property
    def reached(self) -> list[bool]:
        """Whether the backward pass reaches each large block; it keeps nothing of the others."""
        return self.cost.reached(self.adapters)

    @property
    def checkpointed(self) -> list[bool]:
        """Whether each large block is checkpointed, which those without gradients are not."""
        count = len(self.cost.blocks)
        precision = self.config.precision
        is_checkpointed = checkpointed_blocks(
            count, precision.checkpoint_interval, precision.gradient_checkpointing_kept_blocks
        )
        large = is_checkpointed[self.cost.small :]
        return [all(pair) for pair in zip(large, self.reached, strict=True)]

    def inputs_on_host_bytes(self, load: BatchShape) -> float:
        """Bytes of block inputs in host memory at the end of the forward pass."""
        if not self.config.offload.offload_block_inputs:
            return 0.0
        return sum(self._checkpointed_inputs(load)[:-SLOTS])

    def sampling_bytes(self, load: BatchShape) -> float:
        """Bytes of activations of a forward pass without gradients."""
        block = self.one_block(load)
        return block.sampling + block.held + block.outside

    def _checkpointed_inputs(self, load: BatchShape) -> list[float]:
        """Bytes of the inputs of the checkpointed blocks, the smallest first."""
        blocks = zip(self.activations(load), self.checkpointed, strict=True)
        return sorted(block.held for block, is_checkpointed in blocks if is_checkpointed)

    def one_block(self, load: BatchShape) -> Activations:
        """Activations of a large block that processes all tokens."""
        return self.cost.activations(load, BYTES[self.dtype], self.adapters)


def _share_of_process(block: Activations, processes: int) -> Activations:
    """The activations of a block in one process of a sequence-parallel group."""
    exchanging = EXCHANGE_COPIES * block.held
    return replace(
        block,
        held=block.held / processes,
        saved=block.saved / processes,
        attention=block.attention / processes,
        transient=(block.transient + exchanging) / processes,
    )


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
    """Bytes that each process sends in an optimizer step, without the all-to-alls of blocks.

    DDP communicates once per optimizer step, FSDP2 in each micro-step.

    Args:
        added: cost that techniques add to a micro-step.
    """
    if not model.trains:
        return Sent()
    launch = model.config.launch
    # Part of a tensor that a process of a ring sends in an all-gather or a reduce-scatter; an
    # all-reduce is both, hence twice.
    share = (launch.num_processes - 1) / launch.num_processes
    weights = sum(model.unquantised_blocks) + model.rest_bytes
    # Modules of techniques and adapters are whole in every process, whatever shards the model.
    reduced: float = added.parameters * BYTES["fp32"]
    if not model.is_full:
        reduced += model.trained_numbers * model.number_bytes
    elif not model.is_sharded:
        reduced += weights
    if not model.is_sharded:
        return Sent(reduced=2 * share * reduced)

    micro_steps = model.config.schedule.gradient_accumulation_steps
    backward = 1 + added.passes
    # Weights are gathered for each forward pass, and again for the backward pass unless they were
    # kept.
    gathered = backward + added.forwards
    if launch.fsdp_reshard_after_forward:
        gathered += backward
    # FSDP2 reduces the gradients of a full fine-tune in every backward pass.
    scattered = backward if model.is_full else 0.0
    return Sent(
        reduced=2 * share * reduced,
        gathered=share * weights * gathered * micro_steps,
        scattered=share * weights * scattered * micro_steps,
    )


def exchange_seconds(sent: Sent, device: Device, launch: LaunchConfig) -> float:
    """Seconds of communication in an optimizer step, without the all-to-alls of blocks.

    Those count in the time of micro-steps. Processes of a machine communicate over NVLink or the
    host's bus, machines over one network card each.
    """
    slowest = device.rates.link
    if launch.num_machines > 1:
        network = launch.network_gbit / 8 * 1e9  # bytes/s
        slowest = min(slowest, network)
    return (sent.total - sent.exchanged) / slowest
