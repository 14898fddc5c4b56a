"""Activation checkpointing: recomputes activations of blocks in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from simpletuner.config.schema import PrecisionConfig
from simpletuner.config.speed import checkpointed_blocks
from simpletuner.memory.offload.block_inputs import BlockInputs
from simpletuner.models.adapter import BlockLayout
from simpletuner.models.blocks import FastBlocks, SelfAttention

# torch's attention kernels on all devices; their results are kept, all other operations are recomputed.
KEPT = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
# Tokens from which keeping pays off. Its fixed cost per block is more than half of the attention's own time at 256
# tokens, and less than a tenth at 1000.
LONG = 512


def enable_checkpointing(
    transformer: nn.Module,
    layout: BlockLayout,
    config: PrecisionConfig,
    *,
    dropout: bool,
    block_inputs: BlockInputs | None = None,
    keep: FastBlocks | None = None,
) -> None:
    """Checkpoint the blocks that the config says.

    Args:
        dropout: blocks draw random numbers, so the generator's state is restored for the recomputation.
        block_inputs: keeps the hidden states of checkpointed blocks in host memory.
        keep: keeps the result of their attention instead of recomputing it: one more tensor of the hidden states' size
            per block saves the part of the recomputation that is quadratic in tokens.
    """
    if not config.gradient_checkpointing:
        return
    kept = config.gradient_checkpointing_kept_blocks
    are_chosen = checkpointed_blocks(len(layout.blocks), config.checkpoint_interval, kept)
    chosen = {id(block) for block, is_one in zip(layout.blocks, are_chosen, strict=True) if is_one}

    def run_block(block: nn.Module, hidden: Tensor, *others: Any) -> Any:
        if id(block) not in chosen:
            return block(hidden, *others)
        contexts = noop_context_fn
        # Functions that recompute themselves keep their inputs, of which the attention's result is one.
        if keep is not None and (hidden.shape[1] >= LONG or keep.recomputing):
            contexts = partial(keeping_contexts, keep.self_attention)
        with nullcontext() if block_inputs is None else block_inputs.around(hidden):
            return checkpoint(
                block, hidden, *others, use_reentrant=False, preserve_rng_state=dropout, context_fn=contexts
            )

    model: Any = transformer
    model.enable_gradient_checkpointing(run_block)


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `FastBlocks.pieces` with a checkpoint of its own.

    To be compiled: the compiler recomputes only what the backward pass reads, so for instance not the last layer.
    """

    @wraps(function)
    def run(block: nn.Module, *inputs: Tensor | None) -> Any:
        return checkpoint(partial(function, block), *inputs, use_reentrant=False, preserve_rng_state=False)

    return run


def outside_checkpoints() -> saved_tensors_hooks:
    """Isolate a separate autograd graph inside a block.

    These no-op hooks shadow those of a surrounding checkpoint, which would take the graph's saved tensors for its own.
    """
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def keeping_contexts(keep: SelfAttention) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for a block's forward pass and recomputation, which keep the attention's result between them."""
    saving, replaying = create_selective_checkpoint_contexts(KEPT)
    # Entered around the attention only: a dispatch mode adds some microseconds to every operation.
    return keep.within(saving), keep.within(replaying)
