"""Activation checkpointing: recomputes activations of blocks instead of keeping them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from simpletuner.config.schema import PrecisionConfig
from simpletuner.config.speed import checkpointed_blocks
from simpletuner.memory.offload.block_inputs import BlockInputs
from simpletuner.models.adapter import BlockLayout
from simpletuner.models.blocks import AttentionKernel, SelfAttention
from simpletuner.speed.backward import BackwardPass


def enable_checkpointing(
    transformer: nn.Module,
    layout: BlockLayout,
    config: PrecisionConfig,
    *,
    dropout: bool,
    block_inputs: BlockInputs | None = None,
    keep: SelfAttention | None = None,
) -> None:
    """Checkpoint blocks as configured, where the backward pass reaches them.

    Args:
        dropout: blocks draw random numbers, so the generator's state is restored for recomputation.
        block_inputs: keeps the hidden states of checkpointed blocks in host memory.
        keep: the attention whose output is kept: one tensor of the hidden states' size per block
            avoids the quadratic part of the recomputation.
    """
    if not config.gradient_checkpointing:
        return
    kept = config.gradient_checkpointing_kept_blocks
    are_checkpointed = checkpointed_blocks(len(layout.blocks), config.checkpoint_interval, kept)
    chosen: set[int] = set()
    for block, is_checkpointed in zip(layout.blocks, are_checkpointed, strict=True):
        if is_checkpointed:
            chosen.add(id(block))
    backward = BackwardPass()

    def run_block(block: nn.Module, hidden: Tensor, *others: Any) -> Any:
        if id(block) not in chosen or not backward.reaches(block, hidden, others):
            return block(hidden, *others)
        contexts: Callable[[], Any] = noop_context_fn
        if keep is not None:
            contexts = partial(keeping_contexts, keep)
        with nullcontext() if block_inputs is None else block_inputs.around(hidden):
            return checkpoint(
                block,
                hidden,
                *others,
                use_reentrant=False,
                preserve_rng_state=dropout,
                context_fn=contexts,
            )

    model: Any = transformer
    model.enable_gradient_checkpointing(run_block)


def checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `FastBlocks.pieces` with a separate checkpoint.

    For compilation: the compiler recomputes only what the backward pass reads, so not the last
    layer.
    """

    def run(block: nn.Module, *inputs: Tensor | None) -> Any:
        return checkpoint(
            partial(function, block), *inputs, use_reentrant=False, preserve_rng_state=False
        )

    # torch tracks sizes by code object: with a shared one, a size that differs between two
    # functions would become a symbol, even if it is 1, which torch 2.11 cannot broadcast.
    run.__code__ = run.__code__.replace(co_name=function.__name__)
    return wraps(function)(run)


def outside_checkpoints() -> saved_tensors_hooks:
    """Isolate a separate autograd graph inside a block.

    These no-op hooks shadow the hooks of an enclosing checkpoint, which would otherwise capture the
    graph's saved tensors.
    """
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def keeping_contexts(
    keep: SelfAttention,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for a block's forward pass and its recomputation, which reuses the attention."""
    kept = KeptAttention()
    return keep.through(kept), keep.through(kept)


class KeptAttention:
    """The self-attention of one checkpointed block.

    Keeps the output, and the kernel's other outputs for the gradient. Queries, keys and values come
    from the recomputation, which ends here or continues with the output.
    """

    def __init__(self) -> None:
        self.result: Tensor | None = None

    def __call__(self, kernel: AttentionKernel, *inputs: Tensor) -> Tensor:
        # In the recomputation, this call fills the checkpoint's place for queries, keys and values.
        passed: tuple[Tensor, ...] = Recomputed.apply(*inputs)
        if self.result is not None:  # so this is the recomputation
            return self.result.transpose(1, 2)
        with SavedAsRecipes(passed):
            out = kernel(*passed)
        # `B H S D`, for the same strides as `torch_attention`: other strides would need another
        # compiled version.
        self.result = out.detach().transpose(1, 2).detach().requires_grad_(out.requires_grad)
        return out


class Recomputed(torch.autograd.Function):
    """The identity; saves its tensors in the block's checkpoint, so that they are recomputed."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


class SavedAsRecipes(saved_tensors_hooks):
    """Hooks that save views of `Recomputed` outputs as recipes, and all other tensors as usual.

    A recipe makes the view from the recomputed tensor when the backward pass needs it.
    """

    def __init__(self, passed: Sequence[Tensor]) -> None:
        # Kernels save transposed or reshaped views, which share only the storage.
        index_of = {value.untyped_storage()._cdata: index for index, value in enumerate(passed)}
        node: Any = passed[0].grad_fn

        @cache  # a checkpoint returns every tensor only once
        def recomputed() -> tuple[Tensor, ...]:
            return node.saved_tensors

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            index = index_of.get(tensor.untyped_storage()._cdata)
            if index is None:
                return tensor
            size = tensor.size()
            stride = tensor.stride()
            offset = int(tensor.storage_offset())
            return lambda: torch.as_strided(recomputed()[index], size, stride, offset)

        def unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
            return saved if isinstance(saved, Tensor) else saved()

        super().__init__(pack, unpack)
