"""Sequence parallelism (Ulysses): the processes of a group shard the tokens of the same samples.

Between the first and the last visual block, a process holds `s` of the `S` tokens of each sample.
Only self-attention needs all of them: an all-to-all before it swaps tokens for heads among the P
processes, and one after it swaps back. Each process attends over all tokens with `H/P` heads, so
every attention kernel works unchanged, including block-sparse attention (Jacobs et al., "DeepSpeed
Ulysses", arXiv 2309.14509). Outside these blocks, the processes of a group do the same computation.

Gradients: each process of a group computes the same loss L, and the backward pass of every exchange
is its adjoint. So the group differentiates the sum of its losses, P L, and process p gets the
derivative with respect to its copy w_p of a weight. Since all copies are equal,

    sum over p of d(P L)/dw_p = P dL/dw,

whether the weight sees a shard of the tokens or all of them. DDP and FSDP2 divide the sum over all
processes by the number of processes, P times the number of groups. The result is the mean of dL/dw
over the groups.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.weak import WeakTensorKeyDictionary

from simpletuner.distributed.world import EXCHANGE_SECONDS, World

# Dimensions of `B S H D`.
TOKENS = 1
HEADS = 2


@dataclass(eq=False)
class SequenceGroup:
    """The processes that shard the tokens of the same samples.

    Without gradients, each process has all tokens. The number of tokens need not be divisible: the
    first processes get one more.

    Attributes:
        rank, size: rank of this process in the group, and size of the group.
        handle: the process group of torch.distributed.
        tokens: number of tokens `S` of a sample in the current micro-batch; see `TokenSplit`.
    """

    rank: int
    size: int
    handle: Any
    tokens: int = 0

    @classmethod
    def connect(cls, world: World, size: int) -> SequenceGroup:
        """The group of this process; groups consist of consecutive ranks. Collective."""
        # Twice the watch's limit, as in the default group: the watch names missing ranks, torch's
        # timeout does not.
        handle, _ = distributed.new_subgroups(
            group_size=size, timeout=timedelta(seconds=2 * EXCHANGE_SECONDS)
        )
        return cls(world.rank % size, size, handle)

    def local_shard(self, x: Tensor) -> Tensor:
        """This process's shard of the tokens: `B s ...` from `B S ...`."""
        shard = x.tensor_split(self.size, TOKENS)[self.rank]
        # A copy: a view would keep all tokens alive, and compiled functions would specialise on its
        # layout.
        return shard.clone(memory_format=torch.contiguous_format)

    def gathered(self, x: Tensor) -> Tensor:
        """All tokens `B S D` from this process's shard `B s D`."""
        return Gather.apply(x, self)

    def by_head(self, x: Tensor) -> Tensor:
        """All tokens for this process's heads `B S H/P D`, from its tokens for all `B s H D`."""
        return Swap.apply(x, self, HEADS, TOKENS)

    def by_token(self, x: Tensor) -> Tensor:
        """The inverse of `by_head`."""
        return Swap.apply(x, self, TOKENS, HEADS)

    def swap(self, x: Tensor, split: int, join: int) -> Tensor:
        """Split one dimension of `B s H D` or `B S h D` across the processes, and join the other.

        Args:
            split, join: `TOKENS` and `HEADS`, or the reverse.
        """
        parts = x.tensor_split(self.size, split)
        # Heads are divided evenly; tokens need not be.
        lengths = self.shard_lengths() if join == TOKENS else [x.shape[join]] * self.size
        return self.exchange(parts, join, lengths)

    def shard_lengths(self) -> list[int]:
        """Number of tokens per process, as `tensor_split` divides them."""
        least, longer = divmod(self.tokens, self.size)
        return [least + 1] * longer + [least] * (self.size - longer)

    def exchange(self, parts: Sequence[Tensor], join: int, lengths: Sequence[int]) -> Tensor:
        """All-to-all: send one part to each process, and join the received parts in a dimension.

        Args:
            lengths: lengths of the received parts in that dimension; other dimensions are as in
                `parts[rank]`.
        """
        # The collective exchanges flat buffers, so parts are packed, and unpacked afterwards.
        kept = parts[self.rank]
        sent_sizes = [part.numel() for part in parts]
        sent = kept.new_empty(sum(sent_sizes))
        for segment, part in zip(sent.split(sent_sizes), parts, strict=True):
            segment.view(part.shape).copy_(part)

        shapes = [(*kept.shape[:join], length, *kept.shape[join + 1 :]) for length in lengths]
        received_sizes = [math.prod(shape) for shape in shapes]
        received = kept.new_empty(sum(received_sizes))
        distributed.all_to_all_single(received, sent, received_sizes, sent_sizes, group=self.handle)
        segments = received.split(received_sizes)
        joined = [segment.view(shape) for segment, shape in zip(segments, shapes, strict=True)]
        return torch.cat(joined, join)


class TokenSplit:
    """Hooks of blocks in which each process of a group has a shard of the tokens.

    Without gradients, they do nothing. The first block splits the tokens `B S D`, which are its
    first argument, and the last one gathers them. Each block splits the rotary embeddings.

    Args:
        rope: position of the block argument with the rotary embeddings of all tokens, `B S ...`.
    """

    def __init__(self, group: SequenceGroup, rope: int) -> None:
        self._group = group
        self._rope = rope
        # By table of all tokens. All blocks get the same shard, since they cache values derived
        # from it.
        self._shards: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Split the tokens from the first of these blocks to the last."""
        blocks[0].register_forward_pre_hook(self._split_tokens)
        for block in blocks:
            block.register_forward_pre_hook(self._split_rope)
        blocks[-1].register_forward_hook(self._gather_tokens)

    def _split_tokens(self, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled():
            return None
        tokens, *rest = inputs
        self._group.tokens = tokens.shape[TOKENS]
        return self._group.local_shard(tokens), *rest

    def _split_rope(self, block: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled():
            return None
        table = inputs[self._rope]
        if table not in self._shards:
            self._shards[table] = self._group.local_shard(table)
        return *inputs[: self._rope], self._shards[table], *inputs[self._rope + 1 :]

    def _gather_tokens(
        self, block: nn.Module, inputs: tuple[Any, ...], output: Tensor
    ) -> Tensor | None:
        if not torch.is_grad_enabled():
            return None
        return self._group.gathered(output)


class Swap(torch.autograd.Function):
    """`SequenceGroup.swap`; the backward pass swaps back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, split: int, join: int) -> Tensor:
        ctx.group = group
        ctx.back = (join, split)
        return group.swap(x, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.swap(grad, *ctx.back), None, None, None


class Gather(torch.autograd.Function):
    """All-gather of the shards to `B S D`.

    The adjoint is a reduce-scatter. All processes compute the same gradient of all tokens, so the
    result is P times this process's shard, without communication.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.exchange([x] * group.size, TOKENS, group.shard_lengths())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.size * ctx.group.local_shard(grad), None
