"""The repeated blocks of a transformer as a few functions that training can compile or wrap.

A family that provides them (`FamilyAdapter.use_fast_blocks`) computes exactly what its diffusers blocks compute.
Self-attention is a separate function between the others, so that checkpointing can keep its result and a device can use
its fastest kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
AttentionCall = Callable[[AttentionKernel, Tensor, Tensor, Tensor], Tensor]
# Errors unrelated to the kernel on trial: no memory is left, or an earlier call has made the device unusable.
DEVICE_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError)


def torch_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √D) V of `B S H D` tensors; `mask` `B 1 1 S` is true for visible keys."""
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))  # B H S D
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def call_kernel(kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return kernel(query, key, value)


class SelfAttention:
    """The self-attention shared by all blocks of a transformer; never part of a compiled function.

    Attributes:
        choose: picks the kernel of a dense call; it may time kernels, since it never runs inside a compiled function.
    """

    def __init__(self) -> None:
        self.choose: Callable[[Tensor, Tensor, Tensor], AttentionKernel] = lambda query, key, value: torch_attention
        self._call: AttentionCall = call_kernel

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel | None = None) -> Tensor:
        return self._call(kernel or self.choose(query, key, value), query, key, value)

    @property
    def is_kept(self) -> bool:
        """Whether calls are redirected, as in checkpointed blocks that keep the result."""
        return self._call is not call_kernel

    @contextmanager
    def through(self, call: AttentionCall) -> Iterator[None]:
        """Redirect calls to `call`."""
        previous, self._call = self._call, call
        try:
            yield
        finally:
            self._call = previous


class FreeSizes:
    """Marks dimensions as dynamic for the compiler.

    Marking takes longer than launching a kernel, so inputs of a shape are marked once, and again after a compilation.
    """

    def __init__(self) -> None:
        self._marked: set[object] = set()
        self._graphs = 0

    def mark(self, inputs: Sequence[Tensor | None], dimensions: Callable[[Tensor], Sequence[int]]) -> None:
        """Mark those dimensions of the inputs of a call."""
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if graphs != self._graphs:
            self._graphs = graphs
            self._marked.clear()
        kinds = [None if each is None else (each.shape, each.dtype, each.requires_grad) for each in inputs]
        call = (torch.is_grad_enabled(), *kinds)
        if call in self._marked:
            return
        self._marked.add(call)
        for tensor in inputs:
            if tensor is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, [*dimensions(tensor)])


@dataclass
class FastBlocks:
    """State shared by all fast blocks of a transformer.

    Attributes:
        pieces: the functions before and after the self-attention, by name; replacing one affects all blocks. The first
            argument is a block, the second its hidden states, the others are tensors or None. Dimension 1 of every
            tensor counts tokens, or is 1, or is the same at every size.
        last: names of functions that end a block.
        recomputing: versions of those that keep only their inputs for the backward pass, by name.
        beyond: entered around those in a checkpointed block; it hides the block's checkpoint from them.
    """

    pieces: dict[str, Callable[..., Any]]
    self_attention: SelfAttention = field(default_factory=SelfAttention)
    last: tuple[str, ...] = ()
    recomputing: dict[str, Callable[..., Any]] = field(default_factory=dict)
    beyond: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def finish(self, name: str, *inputs: Any) -> Any:
        """Run the last function of a block.

        In a checkpointed block, a version that recomputes itself stays outside the checkpoint, whose recomputation then
        ends before it.
        """
        if name not in self.recomputing or not self.self_attention.is_kept:
            return self.pieces[name](*inputs)
        with self.beyond:
            return self.recomputing[name](*inputs)
