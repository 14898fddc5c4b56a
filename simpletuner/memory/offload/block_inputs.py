"""Inputs of checkpointed blocks wait for the backward pass in host memory.

Activation checkpointing keeps one tensor per block, its input: of a long clip they are the largest thing on the
device. They leave it behind the block's back on a stream of their own, in the direction of the bus that streamed
weights do not use, and come back one block early.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.memory.offload.image import Span

logger = logging.getLogger(__name__)


class _Kept:
    """One tensor in host memory.

    Attributes:
        host: its values.
        before: what was kept before it, and will be wanted after it.
        coming: the copy on the device and the event of its arrival, once it has been asked for.
    """

    def __init__(self, host: Tensor, before: weakref.ref[_Kept] | None) -> None:
        self.host, self.before = host, before
        self.coming: tuple[Tensor, torch.cuda.Event | None] | None = None


class BlockInputs:
    """Keeps the hidden states that blocks are called with.

    Args:
        device: where the blocks compute. Without CUDA the copies are made at once, and save nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.side is None:
            logger.warning("offload_block_inputs saves nothing: the compute device is no CUDA device.")
        self._free: list[Tensor] = []  # page-locked bytes
        self._last: weakref.ref[_Kept] | None = None

    def around(self, hidden_states: Tensor) -> saved_tensors_hooks:
        """Wraps one checkpointed call of a block.

        `hidden_states` is the input that changes from block to block; the others are the same for all blocks and
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
        with self._beside():
            host.copy_(tensor, non_blocking=True)
        if self.side is not None:
            tensor.record_stream(self.side)
        kept = _Kept(host, self._last)
        self._last = weakref.ref(kept)
        weakref.finalize(kept, self._free.append, buffer).atexit = False
        return kept

    def _return(self, kept: _Kept) -> Tensor:
        tensor, arrival = kept.coming or self._fetch(kept)
        before = kept.before() if kept.before is not None else None
        if arrival is not None:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(arrival)
            tensor.record_stream(compute)
        if before is not None and before.coming is None:
            before.coming = self._fetch(before)
        return tensor

    def _fetch(self, kept: _Kept) -> tuple[Tensor, torch.cuda.Event | None]:
        """Begin to bring a tensor back."""
        with self._beside():
            # A copy of its own also on a CPU: the buffer will hold another tensor.
            tensor = torch.empty_like(kept.host, device=self.device, pin_memory=False)
            tensor.copy_(kept.host, non_blocking=True)
        return tensor, None if self.side is None else self.side.record_event()

    def _buffer(self, nbytes: int) -> Tensor:
        """Host memory of at least so many bytes: the smallest that an earlier tensor has left, or new.

        All copies run on one stream one after the other, so a buffer may be given on while it is still being read.
        One that is too small is given up for the new one: there are never more than tensors at a time.
        """
        self._free.sort(key=Tensor.numel)
        index = next((index for index, each in enumerate(self._free) if each.numel() >= nbytes), None)
        if index is not None:
            return self._free.pop(index)
        del self._free[:1]
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.side is not None)

    def _beside(self) -> AbstractContextManager[object]:
        """The side stream, from this point of the compute on."""
        if self.side is None:
            return nullcontext()
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.side)
