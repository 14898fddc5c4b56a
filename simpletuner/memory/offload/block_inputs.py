"""Keeps the inputs of checkpointed blocks in host memory until the backward pass.

Activation checkpointing keeps one tensor per block, its input; for long clips these dominate device memory. They are
copied to the host on a separate stream while the block computes, in the bus direction that streamed weights leave free,
and are copied back one block ahead.
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.memory.offload.beside import SideStream
from simpletuner.memory.offload.image import Span

logger = logging.getLogger(__name__)


class _Kept:
    """One tensor in host memory.

    Attributes:
        host: its values.
        before: the tensor kept before it, which the backward pass needs after it.
        coming: its copy on the device and the event that completes it, once requested.
    """

    def __init__(self, host: Tensor, before: weakref.ref[_Kept] | None) -> None:
        self.host, self.before = host, before
        self.coming: tuple[Tensor, torch.cuda.Event | None] | None = None


class BlockInputs:
    """Offloads the hidden states that blocks are called with.

    Args:
        device: where the blocks compute. Without CUDA, copies are synchronous and save nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.side = SideStream(device)
        if self.side.stream is None:
            logger.warning("offload_block_inputs saves nothing: the compute device is no CUDA device.")
        self._free: list[Tensor] = []  # page-locked bytes
        self._last: weakref.ref[_Kept] | None = None

    def around(self, hidden_states: Tensor) -> saved_tensors_hooks:
        """Hooks to wrap around one checkpointed call of a block.

        `hidden_states` is the input that changes from block to block; the other inputs are shared by all blocks and
        stay on the device.
        """
        address = hidden_states.data_ptr()

        def pack(tensor: Tensor) -> Tensor | _Kept:
            return self._leave(tensor) if tensor.data_ptr() == address else tensor

        def unpack(saved: Tensor | _Kept) -> Tensor:
            return saved if isinstance(saved, Tensor) else self._return(saved)

        return saved_tensors_hooks(pack, unpack)

    def _leave(self, tensor: Tensor) -> _Kept:
        buffer = self._buffer(tensor.nbytes)
        host = Span.of(tensor).view(buffer)
        with self.side.after_compute():
            host.copy_(tensor, non_blocking=True)
        self.side.keep(tensor)
        kept = _Kept(host, self._last)
        self._last = weakref.ref(kept)
        # Its buffer is free as soon as autograd drops the saved tensor.
        weakref.finalize(kept, self._free.append, buffer).atexit = False
        return kept

    def _return(self, kept: _Kept) -> Tensor:
        tensor, arrival = kept.coming or self._fetch(kept)
        before = kept.before() if kept.before is not None else None
        self.side.hold_compute(arrival)
        # Requested one block ahead: the copy runs while this block is recomputed.
        if before is not None and before.coming is None:
            before.coming = self._fetch(before)
        return tensor

    def _fetch(self, kept: _Kept) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy a tensor back to the device."""
        # A real copy on a CPU too: the buffer will be reused for another tensor.
        tensor = torch.empty_like(kept.host, device=self.side.device)
        with self.side.after_compute():
            tensor.copy_(kept.host, non_blocking=True)
        return tensor, self.side.keep(tensor)

    def _buffer(self, nbytes: int) -> Tensor:
        """Host memory of at least `nbytes` bytes: the smallest free buffer, or a new one.

        All copies run in order on one stream, so a buffer can be reused while it is still being read. A new buffer
        replaces a free one that is too small: there are never more buffers than tensors.
        """
        self._free.sort(key=Tensor.numel)
        index = next((index for index, each in enumerate(self._free) if each.numel() >= nbytes), None)
        if index is not None:
            return self._free.pop(index)
        del self._free[:1]
        return self.side.host_memory(nbytes)
