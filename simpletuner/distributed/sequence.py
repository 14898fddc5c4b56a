"""Sequence parallelism (Ulysses): the processes of a group train on the same samples, each on a share of the tokens.

Between the first and the last visual block, a process has `s` of the `S` tokens of each sample. Only self-attention
needs the others: before it the P processes exchange tokens for heads, and after it heads for tokens. Each attends with
all tokens of `H/P` heads, so every kernel computes what it computes in one process, block-sparse attention included
(Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509). Outside these blocks all processes of a group compute the same.

Gradients. Each process of a group computes the same loss L, and the backward pass of every exchange is its adjoint. So
the group differentiates the sum of its losses, P L, and process p gets the derivative by its copy w_p of a weight.
Since all copies are equal,

    sum over p of d(P L)/dw_p = P dL/dw,

whether the weight sees a share of the tokens or all of them. DDP and FSDP2 divide the sum over all processes by their
number, which is P times that of the groups. The result is the mean of dL/dw over the groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.utils.weak import WeakTensorKeyDictionary

from simpletuner.distributed.world import EXCHANGE_SECONDS, World

TOKENS, HEADS = 1, 2  # dimensions of `B S H D`


@dataclass(eq=False)
class SequenceGroup:
    """The processes that share the tokens of the same samples; without gradients, each has all tokens.

    Any number of tokens can be shared: the first processes have one more than the others.

    Attributes:
        rank, size: of this process in the group, and of the group.
        handle: the group in torch.distributed.
    """

    rank: int
    size: int
    handle: Any
    _tokens: int = field(default=0, init=False)  # of a sample of the micro-batch in work
    _ropes: Any = field(default_factory=WeakTensorKeyDictionary, init=False)  # this process's share, by whole table

    @classmethod
    def connect(cls, world: World, size: int) -> SequenceGroup:
        """The group of this process; groups are of consecutive ranks. Collective."""
        # Twice the watch's limit, as for all processes: the watch names who is missing, a timeout of torch would not.
        handle, _ = distributed.new_subgroups(group_size=size, timeout=timedelta(seconds=2 * EXCHANGE_SECONDS))
        return cls(world.rank % size, size, handle)

    def attach(self, blocks: Sequence[nn.Module], rope: int) -> None:
        """Share the tokens from the first of these blocks to the last.

        Args:
            rope: position of the blocks' argument with the rotations of all tokens, `B S ...`.
        """
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._enter, rope=rope, opens=number == 0))
        blocks[-1].register_forward_hook(self._leave)

    def _enter(self, block: nn.Module, inputs: tuple[Any, ...], *, rope: int, opens: bool) -> tuple[Any, ...] | None:
        if not torch.is_grad_enabled():
            return None
        cut = list(inputs)
        if opens:
            self._tokens, cut[0] = inputs[0].shape[TOKENS], self.own(inputs[0])
        # The same tensor for all blocks, which keep what they compute from it.
        if inputs[rope] not in self._ropes:
            self._ropes[inputs[rope]] = self.own(inputs[rope])
        cut[rope] = self._ropes[inputs[rope]]
        return tuple(cut)

    def _leave(self, block: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        return self.gathered(output) if torch.is_grad_enabled() else None

    def own(self, x: Tensor) -> Tensor:
        """This process's share of all tokens: `B s ...` from `B S ...`."""
        # A copy: compiled functions would need a version for every layout of a view, which also keeps all tokens alive.
        return x.tensor_split(self.size, TOKENS)[self.rank].clone(memory_format=torch.contiguous_format)

    def gathered(self, x: Tensor) -> Tensor:
        """All tokens `B S D` from this process's share `B s D`."""
        return Gather.apply(x, self)

    def by_head(self, x: Tensor) -> Tensor:
        """All tokens of this process's heads, `B S H/P D`, from its tokens of all heads, `B s H D`."""
        return Swap.apply(x, self, HEADS, TOKENS)

    def by_token(self, x: Tensor) -> Tensor:
        """The opposite of `by_head`."""
        return Swap.apply(x, self, TOKENS, HEADS)

    def swap(self, x: Tensor, split: int, join: int) -> Tensor:
        """Divide a dimension of `B s H D` or `B S h D` among the processes, and join the other one."""
        parts = x.tensor_split(self.size, split)
        return self.exchange(parts, join, self.shares() if join == TOKENS else [x.shape[join]] * self.size)

    def shares(self) -> list[int]:
        """How many tokens of a sample each process has, as `tensor_split` divides them."""
        least, more = divmod(self._tokens, self.size)
        return [least + (rank < more) for rank in range(self.size)]

    def exchange(self, parts: Sequence[Tensor], join: int, lengths: Sequence[int]) -> Tensor:
        """Send a part to each process; returns what they sent to this one, joined in a dimension.

        Args:
            lengths: of the tensors that arrive, in that dimension; in the others they are as `parts[rank]`.
        """
        own, sizes = parts[self.rank], [part.numel() for part in parts]
        shapes = [(*own.shape[:join], length, *own.shape[join + 1 :]) for length in lengths]
        sent = own.new_empty(sum(sizes))
        for room, part in zip(sent.split(sizes), parts, strict=True):
            room.view(part.shape).copy_(part)
        arriving = [math.prod(shape) for shape in shapes]
        found = own.new_empty(sum(arriving))
        distributed.all_to_all_single(found, sent, arriving, sizes, group=self.handle)
        return torch.cat([part.view(shape) for part, shape in zip(found.split(arriving), shapes, strict=True)], join)


class Swap(torch.autograd.Function):
    """`SequenceGroup.swap`, whose adjoint swaps back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.back = group, (join, split)
        return group.swap(x, split, join)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.group.swap(grad, *ctx.back), None, None, None


class Gather(torch.autograd.Function):
    """`B S D` from the shares of all processes. The adjoint sums what they send back; all of them compute the same
    gradient of all tokens, so the sum is P times this process's own share of it, and nothing is sent.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return group.exchange([x] * group.size, TOKENS, group.shares())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.size * ctx.group.own(grad), None
