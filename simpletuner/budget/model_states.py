"""Memory of weights, of what training keeps for them, and of their gradients.

When gradients appear in a step is up to `step_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from simpletuner.config.optimizers import (
    OPTIMIZERS,
    optimizer_name,
    trained_precision,
    update_kernel,
    widens_second_moment,
)
from simpletuner.config.precision import quantised_bytes, transformer_dtype
from simpletuner.config.schema import SLOTS, OptimizerName, RunConfig
from simpletuner.config.speed import stores_modulation_in_bf16
from simpletuner.models.cost import BYTES, NO_ADAPTERS, Adapters, TransformerCost

AVERAGE_BYTES = 4.0  # per number of a moving average: float32
# Numbers that a moving average updates at once, as float32 copies; one weight may have more.
AVERAGE_BUNDLE = 1 << 24
SAVED_FILE_BYTES = 5e9  # per file of a saved full model, each assembled in host memory

# Blocks in FSDP2's buffers besides the one that computes. The weights of a block are kept until
# those of the next arrive, since they are gathered in another stream; gradients are copied once to
# be reduced (torch 2.13, `FSDPParamGroup.wait_for_unshard`).
GATHERED_BLOCKS = 2
SCATTERED_BLOCKS = 1


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

    @cached_property
    def optimizer(self) -> OptimizerName:
        return optimizer_name(self.config.optimizer, self.config.precision.mixed_precision)

    def state_bytes(self, dtype: str) -> float:
        """Bytes of optimizer state per number of a trained weight of this dtype."""
        spec = OPTIMIZERS[self.optimizer]
        moment = BYTES[dtype] if spec.moment_bytes is None else spec.moment_bytes
        size = spec.moments * moment
        if dtype != "bf16":
            return size
        if not spec.rounds_randomly:
            size += BYTES[dtype]  # Kahan summation: the lost low bits of each weight
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
    def is_replicated(self) -> bool:
        """Whether DDP keeps whole copies of the trained weights equal."""
        return self.config.launch.num_processes > 1 and self.trained_shares == 1

    @property
    def trained_numbers(self) -> int:
        return self.cost.parameters if self.is_full else self.cost.adapter_parameters(self.adapters)

    def trained_total(self, bytes_of: Callable[[str], float]) -> float:
        """The bytes of something that every trained number has one of.

        Args:
            bytes_of: dtype of a trained weight -> bytes per number.
        """
        # Some layers stay float32 in a model of another dtype.
        wide = self.cost.float32_parameters if self.is_full else 0
        usual = self.trained_numbers - wide
        return usual * bytes_of(self.trained_dtype) + wide * bytes_of("fp32")

    @cached_property
    def trained_weights(self) -> float:
        """Bytes of all trained weights."""
        return self.trained_total(lambda dtype: BYTES[dtype])

    @cached_property
    def optimizer_bytes(self) -> float:
        """Bytes of all optimizer state."""
        return self.trained_total(self.state_bytes)

    @cached_property
    def narrows_modulation(self) -> bool:
        """Whether modulation weights are stored in bf16, as is done with frozen ones."""
        if self.is_full or not stores_modulation_in_bf16(self.config.speed):
            return False
        # An adapter on one of them keeps all in float32 while they are loaded.
        return not any(self.cost.fits_bf16(f"{name}.weight") for name in self.adapters.modules)

    @cached_property
    def rest_bytes(self) -> float:
        """Bytes of the weights outside the blocks."""
        return self.cost.rest_bytes(self.dtype, narrow=self.narrows_modulation)

    @cached_property
    def blocks(self) -> list[float]:
        """Bytes of each block's weights, as they wait and stream."""
        quantised = quantised_bytes(self.config.precision.base_model_precision)
        return self.cost.block_bytes(
            self.dtype, quantised=quantised, narrow=self.narrows_modulation
        )

    @cached_property
    def unquantised_blocks(self) -> list[float]:
        """Bytes of each block's weights as they are read, before they are quantised or narrowed."""
        return self.cost.block_bytes(self.dtype, quantised=0.0)

    @property
    def streamed_blocks(self) -> int:
        """Number of blocks that stream through the device; 0 without group offload."""
        if not self.config.offload.enable_group_offload:
            return 0
        return max(len(self.blocks) - self.config.offload.group_offload_resident_blocks, 0)

    @cached_property
    def update_tensors(self) -> int:
        """Temporary tensors as large as all trained weights, while a GPU updates them at once.

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
            return 0
        return OPTIMIZERS[self.optimizer].temporaries

    @cached_property
    def trained_bytes(self) -> float:
        """Bytes on the device of trained weights, optimizer state and moving average.

        They are there throughout training, unlike gradients and the temporaries of an update.
        """
        weights_and_state = (self.trained_weights + self.optimizer_bytes) / self.trained_shares
        average = self.average_memory("device").kept
        return weights_and_state + average - self.state_on_host_bytes

    @property
    def state_on_host_bytes(self) -> float:
        """Bytes of optimizer state in host memory; 0 without `offload_optimizer_state`."""
        if not self.config.offload.offload_optimizer_state:
            return 0.0
        # At a time the device holds the state of one weight that is updated, of one that arrives,
        # and of SLOTS + 1 that leave. Assume the largest weight for all of them.
        on_device = (SLOTS + 3) * self.cost.largest_weight * self.state_bytes(self.trained_dtype)
        return max(self.optimizer_bytes - on_device, 0)

    @property
    def releases_gradients(self) -> bool:
        """Whether each weight is updated as soon as its gradient is complete."""
        return self.config.optimizer.optimizer_release_gradients

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradients of all trained weights."""
        return self.trained_weights / self.trained_shares

    @cached_property
    def block_gradients(self) -> list[float]:
        """Bytes of the gradients of each block, in order."""
        if self.is_full:
            # A gradient has the dtype of its weight.
            return [block / self.trained_shares for block in self.unquantised_blocks]
        numbers = self.cost.adapter_parameters_by_block(self.adapters)
        return [BYTES[self.trained_dtype] * count for count in numbers]

    @property
    def bucket_bytes(self) -> float:
        """Bytes of the buckets in which DDP keeps gradients, also between steps."""
        return self.gradient_bytes if self.is_replicated else 0.0

    @property
    def accumulated_bytes(self) -> float:
        """Bytes of gradients that exist before the last backward pass of a step."""
        if self.config.schedule.gradient_accumulation_steps > 1:
            return self.gradient_bytes  # of earlier micro-steps
        return self.bucket_bytes

    def checkpoint_bytes(self, copies: int) -> float:
        """Bytes of a checkpoint with its moving average.

        Args:
            copies: how often it has the trained weights.
        """
        size = copies * self.trained_weights + self.optimizer_bytes
        if self.config.ema.use_ema:
            # As state to resume from, and as weights to use.
            size += AVERAGE_BYTES * self.trained_numbers + self.trained_weights
        return size

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
            waiting=self.trained_weights / self.trained_shares,
        )

    @property
    def saving_bytes(self) -> float:
        """Host memory for saving a checkpoint, without the average."""
        if self.is_full:
            return min(self.trained_weights, SAVED_FILE_BYTES)  # one file at a time
        return 2 * self.trained_weights  # a LoRA is small, and is saved in two formats

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
