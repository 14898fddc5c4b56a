"""Recompute block activations in the backward pass instead of keeping them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from simpletuner.config.schema import PrecisionConfig
from simpletuner.memory.offload.block_inputs import BlockInputs
from simpletuner.models.adapter import BlockLayout
from simpletuner.models.blocks import SelfAttention

# torch's attention on each device; what else an attention may be made of is computed again.
KEPT = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]
# Tokens from which on keeping is worth it. It costs a fixed time per block: more than half of the attention itself at
# 256 tokens, less than its tenth at 1000.
LONG = 512


def enable_checkpointing(
    transformer: nn.Module,
    layout: BlockLayout,
    config: PrecisionConfig,
    *,
    dropout: bool,
    block_inputs: BlockInputs | None = None,
    keep: SelfAttention | None = None,
) -> None:
    """Checkpoint every block, or every n-th one with `gradient_checkpointing_interval`.

    Args:
        dropout: whether blocks draw random numbers, whose state must then be put back for the recomputation.
        block_inputs: keeps the hidden states of checkpointed blocks in host memory.
        keep: the attention whose result is kept: a tensor of the hidden states' size per block, in exchange for the
            part of the recomputation that grows with the square of the tokens.
    """
    interval = config.checkpoint_interval
    if interval is None:
        return
    chosen = {id(block) for index, block in enumerate(layout.blocks) if index % interval == 0}

    def run_block(block: nn.Module, hidden: Tensor, *others: Any) -> Any:
        if id(block) not in chosen:
            return block(hidden, *others)
        contexts = noop_context_fn if keep is None or hidden.shape[1] < LONG else partial(keeping_contexts, keep)
        with nullcontext() if block_inputs is None else block_inputs.around(hidden):
            return checkpoint(
                block, hidden, *others, use_reentrant=False, preserve_rng_state=dropout, context_fn=contexts
            )

    model: Any = transformer
    model.enable_gradient_checkpointing(run_block)


def outside_checkpoints() -> saved_tensors_hooks:
    """For a graph of one's own in the middle of a block: nothing that it saves is taken for the block's.

    Hooks that do nothing stand before those of a checkpoint that the block may run in.
    """
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def keeping_contexts(keep: SelfAttention) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a block's forward pass and of its recomputation, between which the attention's result is kept."""
    saving, replaying = create_selective_checkpoint_contexts(KEPT)
    # Around the attention alone: a dispatch mode costs every operation under it some microseconds.
    return keep.within(saving), keep.within(replaying)
