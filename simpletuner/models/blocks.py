"""Fast blocks: the repeated blocks of a transformer as functions that training can compile or wrap.

Fast blocks (`FamilyAdapter.use_fast_blocks`) compute exactly the same as the diffusers blocks.
Self-attention is a separate function, so that checkpointing can keep its output and a package can
compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from simpletuner.models.sequence import SequenceGroup

AttentionKernel = Callable[[Tensor, Tensor, Tensor], Tensor]
AttentionCall = Callable[[AttentionKernel, Tensor, Tensor, Tensor], Tensor]
# Errors unrelated to the tested kernel: out of memory, or a device made unusable by an earlier
# call.
DEVICE_FAILURES = (torch.OutOfMemoryError, torch.AcceleratorError)


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """softmax(Q Kᵀ / √D) V of `B S H D` tensors; `mask` `B 1 1 S` is true for visible keys."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # B H S D
    return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


def call_kernel(kernel: AttentionKernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The usual `AttentionCall`, which does nothing else."""
    return kernel(query, key, value)


class SelfAttention:
    """The self-attention shared by all blocks of a transformer; never part of a compiled function.

    Attributes:
        kernel: computes dense calls.
        group: sequence-parallel group, which shards the heads here; None without one.
    """

    group: SequenceGroup | None = None

    def __init__(self) -> None:
        self.kernel: AttentionKernel = torch_attention
        self._call: AttentionCall = call_kernel

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kernel: AttentionKernel | None = None
    ) -> Tensor:
        """Attention of `B S H D` tensors by `kernel`, or by the dense one; `B S H D`."""
        kernel = kernel or self.kernel
        group = self._active_group
        if group is None:
            return self._call(kernel, query, key, value)
        query, key, value = (group.by_head(x) for x in (query, key, value))
        return group.by_token(self._call(kernel, query, key, value))

    @property
    def _active_group(self) -> SequenceGroup | None:
        """The group, except in previews, which run without gradients: they are not sharded."""
        return self.group if torch.is_grad_enabled() else None

    @property
    def head_shards(self) -> int:
        """The number of processes among which the heads of a call are sharded."""
        group = self._active_group
        return 1 if group is None else group.size

    @property
    def is_kept(self) -> bool:
        """Whether calls are redirected, as in checkpointed blocks that keep the result."""
        return self._call is not call_kernel

    @contextmanager
    def through(self, call: AttentionCall) -> Iterator[None]:
        """Redirect calls to `call`."""
        previous = self._call
        self._call = call
        try:
            yield
        finally:
            self._call = previous


class DynamicSizes:
    """Marks dimensions as dynamic for the compiler, so that it compiles once for all sizes.

    Marking takes longer than launching a kernel, so inputs are marked once per shape, and again
    after a compilation.
    """

    def __init__(self) -> None:
        self._marked: set[object] = set()
        self._graphs = 0

    def mark(
        self, inputs: Sequence[Tensor | None], dimensions: Callable[[Tensor], Sequence[int]]
    ) -> None:
        """Mark `dimensions` of the inputs of a call."""
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        if graphs != self._graphs:  # something was compiled
            self._graphs = graphs
            self._marked.clear()
        kinds = [
            None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
            for tensor in inputs
        ]
        # Training and sampling are compiled separately, as are different dtypes.
        call = (torch.is_grad_enabled(), *kinds)
        if call in self._marked:
            return
        self._marked.add(call)
        for tensor in inputs:
            if tensor is not None:
                # Unlike `mark_dynamic`, this does not raise if the compiler must specialise, as for
                # a size of 1.
                torch._dynamo.maybe_mark_dynamic(tensor, [*dimensions(tensor)])


@dataclass
class FastBlocks:
    """State shared by all fast blocks of a transformer.

    Attributes:
        pieces: the functions before and after the self-attention, by name; replacing one affects
            all blocks. The first argument is a block, the second its hidden states, the others are
            tensors or None. Dimension 1 of every tensor counts tokens, or is 1, or is the same at
            every size.
        last: names of functions that end a block.
        recomputing: versions of the last functions that keep only their inputs for the backward
            pass, by name.
        outside_checkpoint: context around these versions that hides the enclosing block's
            checkpoint.
    """

    pieces: dict[str, Callable[..., Any]]
    self_attention: SelfAttention = field(default_factory=SelfAttention)
    last: tuple[str, ...] = ()
    recomputing: dict[str, Callable[..., Any]] = field(default_factory=dict)
    outside_checkpoint: AbstractContextManager[Any] = field(default_factory=nullcontext)

    def finish(self, name: str, *inputs: Any) -> Any:
        """Run the last function of a block.

        In a checkpointed block, a version that recomputes itself is outside the checkpoint, whose
        recomputation ends before it.
        """
        is_checkpointed = self.self_attention.is_kept
        if name not in self.recomputing or not is_checkpointed:
            return self.pieces[name](*inputs)
        with self.outside_checkpoint:
            return self.recomputing[name](*inputs)
