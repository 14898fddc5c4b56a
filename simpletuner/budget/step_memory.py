"""Estimates the memory on the device at the peak of a training step.

On the device are:

    frozen weights (resident, or the slots they stream through, or with FSDP2 a share and the
    gathered blocks)
  + trained weights, optimizer state
  + inputs of checkpointed blocks, all saved activations of the others
  + the block whose backward pass runs
  + the gradients so far

The backward pass runs from the last block to the first: every block frees what it kept and adds its
gradients. So the peak is at the last block if activations dominate, or at the first if gradients
do, or in the update, which has no activations but all gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from simpletuner.budget.model_states import ModelStates
from simpletuner.config.schema import SLOTS
from simpletuner.config.speed import checkpointed_blocks, keeps_attention
from simpletuner.config.techniques.tread import Route
from simpletuner.models.cost import BYTES, Activations, BatchShape
from simpletuner.planning.techniques.spec import TechniqueCost, TechniqueSpec

# Quantised matmuls add this many bytes per number of the widest layer to the peak: float32 copies
# and sums (measured).
QUANTISED_PRODUCT_BYTES = 4.5

# A block with sequence parallelism exchanges queries, keys, values and the output; each all-to-all
# holds this many copies of its tensor.
EXCHANGE_COPIES = 4
# Every process computes the output layer for all tokens: bytes per number of the hidden states
# (measured).
ALL_TOKENS_BYTES = 14


@dataclass(frozen=True)
class StepMemory:
    """Bytes on the device at the peak of a training step.

    Attributes:
        weights: frozen weights.
        trained: trained weights, optimizer state and moving average.
        gradients: those that exist at the peak.
        inputs: activations kept for the backward pass of the blocks that are to come.
        block: the block whose backward pass runs.
        outside: activations outside the blocks.
        update: temporaries of the optimizer, if the peak is in its update.
    """

    weights: float
    trained: float
    gradients: float = 0.0
    inputs: float = 0.0
    block: float = 0.0
    outside: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


class Moment(NamedTuple):
    """Bytes at a moment of the backward pass.

    Attributes:
        kept: activations kept for the blocks that are to come, and for the one that runs.
        block: what the block that runs needs besides.
        gradients: the gradients so far.
    """

    kept: float
    block: float
    gradients: float


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
        technique_bytes = 2 * BYTES["fp32"] + self.state_bytes("fp32")
        between_steps = StepMemory(
            weights=self.frozen_bytes,
            trained=self.trained_bytes + added.parameters * technique_bytes,
        )
        moment = max(self._moments(load), key=sum)
        backward = replace(
            between_steps,
            gradients=moment.gradients,
            inputs=added.held + moment.kept,
            block=moment.block,
            outside=self._outside_bytes(load),
        )
        updated_bytes = self.gradient_bytes + added.parameters * BYTES["fp32"]
        update = replace(
            between_steps,
            gradients=0.0 if self.releases_gradients else self.gradient_bytes,
            update=self.update_tensors * updated_bytes,
        )
        return max(backward, update, key=lambda memory: memory.total)

    def _moments(self, load: BatchShape) -> Iterator[Moment]:
        """The moments of the backward pass that may be its peak: one of each large block.

        Small blocks come after them, with hardly any activations, so only their gradients count.
        """
        blocks = self.activations(load)
        checkpointed = self.checkpointed
        kept = self._kept_bytes(load)
        accumulated = self.accumulated_bytes
        if self.added(load).passes:
            accumulated = self.gradient_bytes  # of another pass
        # Gradients outside of the blocks are small; assume that they come first.
        gradients = self.gradient_bytes - sum(self.block_gradients)
        remaining = sum(kept) + self._passing_inputs(load)
        product = self._product_bytes(load)
        if self.config.launch.sequence_parallel_size > 1:
            # The output layer comes before the blocks.
            hidden_numbers = load.samples * load.tokens * self.cost.hidden
            output_layer = product + ALL_TOKENS_BYTES * hidden_numbers
            yield Moment(remaining, output_layer, max(gradients, accumulated))

        large_gradients = self.block_gradients[-len(blocks) :]
        for index in reversed(range(len(blocks))):
            if not self.reached[index]:
                return
            block = blocks[index]
            # Recomputing a checkpointed block saves its activations again.
            recomputed = block.saved if checkpointed[index] else 0.0
            gradients += large_gradients[index]
            yield Moment(
                kept=remaining,
                block=product + block.transient + recomputed,
                gradients=max(gradients, accumulated),
            )
            remaining -= kept[index]
            if self.releases_gradients:
                gradients -= large_gradients[index]  # the block is updated

    def _kept_bytes(self, load: BatchShape) -> list[float]:
        """Bytes of activations that each large block keeps for its backward pass."""
        keeps = keeps_attention(self.config.speed)
        inputs_leave = self.config.offload.offload_block_inputs
        kept = []
        blocks = zip(self.activations(load), self.reached, self.checkpointed, strict=True)
        for block, is_reached, is_checkpointed in blocks:
            if not is_reached:
                kept.append(0.0)
            elif not is_checkpointed:
                kept.append(block.held + block.saved)
            else:
                held = 0.0 if inputs_leave else block.held
                attention = block.attention if keeps else 0.0
                kept.append(held + attention)
        return kept

    def _passing_inputs(self, load: BatchShape) -> float:
        """Bytes of block inputs that are still leaving for the host, or already back."""
        if not self.config.offload.offload_block_inputs:
            return 0.0
        return sum(self._checkpointed_inputs(load)[-SLOTS:])  # assume the largest

    def _outside_bytes(self, load: BatchShape) -> float:
        """Bytes of tensors that all blocks share, and of their gradients."""
        outside = self.one_block(load).outside
        if self.is_full:
            outside += self.cost.gradients_of_conditions(load, BYTES[self.dtype])
        return outside

    def _product_bytes(self, load: BatchShape) -> float:
        """Bytes that a product with quantised weights needs besides."""
        if not self.config.precision.quantized_matmul:
            return 0.0
        sequence = self.config.launch.sequence_parallel_size
        return QUANTISED_PRODUCT_BYTES * self.cost.widest(load) / sequence

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
