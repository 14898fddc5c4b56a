"""Keeps the inputs of checkpointed blocks in host memory until the backward pass.

Activation checkpointing keeps the input of every block, and for long clips these inputs dominate
device memory. They are copied to the host on a side stream while the block computes, in the bus
direction that streamed weights leave free, and are prefetched one block ahead.
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.memory.offload.image import Span
from simpletuner.memory.offload.side_stream import SideStream

logger = logging.getLogger(__name__)


class _HostTensor:
    """A tensor in host memory, saved by autograd.

    Attributes:
        host: the values.
        previous: the tensor saved before this one, which the backward pass needs next.
        prefetched: the copy on the device and the event that completes it, once started.
    """

    def __init__(self, host: Tensor, previous: weakref.ref[_HostTensor] | None) -> None:
        self.host = host
        self.previous = previous
        self.prefetched: tuple[Tensor, torch.cuda.Event | None] | None = None


class BlockInputs:
    """Offloads the hidden states passed to blocks.

    Args:
        device: the compute device. Without CUDA, copies are synchronous and save nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.side = SideStream(device)
        if self.side.stream is None:
            logger.warning(
                "offload_block_inputs saves nothing: the compute device is not a CUDA device."
            )
        self._free: list[Tensor] = []  # pinned buffers, as bytes
        # Weak, so that a buffer is free as soon as autograd drops the saved tensor.
        self._last: weakref.ref[_HostTensor] | None = None

    def around(self, hidden_states: Tensor) -> saved_tensors_hooks:
        """Hooks around one checkpointed call of a block.

        `hidden_states` is the input that changes from block to block; all other inputs are common
        to the blocks and stay on the device.
        """
        address = hidden_states.data_ptr()

        def pack(tensor: Tensor) -> Tensor | _HostTensor:
            return self._to_host(tensor) if tensor.data_ptr() == address else tensor

        def unpack(saved: Tensor | _HostTensor) -> Tensor:
            return saved if isinstance(saved, Tensor) else self._to_device(saved)

        return saved_tensors_hooks(pack, unpack)

    def _to_host(self, tensor: Tensor) -> _HostTensor:
        """Start copying a tensor to the host."""
        buffer = self._buffer(tensor.nbytes)
        host = Span.of(tensor).view(buffer)
        with self.side.after_compute():
            host.copy_(tensor, non_blocking=True)
        self.side.keep(tensor)
        saved = _HostTensor(host, self._last)
        self._last = weakref.ref(saved)
        weakref.finalize(saved, self._free.append, buffer).atexit = False
        return saved

    def _to_device(self, saved: _HostTensor) -> Tensor:
        """The tensor on the device, as soon as compute needs it."""
        tensor, arrival = saved.prefetched or self._fetch(saved)
        previous = saved.previous() if saved.previous is not None else None
        self.side.make_compute_wait(arrival)
        # Prefetch one block ahead: the copy runs while this block is recomputed.
        if previous is not None and previous.prefetched is None:
            previous.prefetched = self._fetch(previous)
        return tensor

    def _fetch(self, saved: _HostTensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start copying a tensor back to the device."""
        # A real copy even on a CPU: the buffer will be reused for another tensor.
        tensor = torch.empty_like(saved.host, device=self.side.device)
        with self.side.after_compute():
            tensor.copy_(saved.host, non_blocking=True)
        return tensor, self.side.keep(tensor)

    def _buffer(self, nbytes: int) -> Tensor:
        """Host memory of at least `nbytes` bytes: the smallest free buffer, or a new one.

        All copies run in order on one stream, so a buffer can be reused while it is still being
        read. A new buffer replaces a free buffer that is too small, so there are never more buffers
        than tensors.
        """
        self._free.sort(key=Tensor.numel)
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= nbytes:
                return self._free.pop(index)
        del self._free[:1]
        return self.side.host_memory(nbytes)
