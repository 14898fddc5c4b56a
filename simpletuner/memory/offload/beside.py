"""The stream on which host and device exchange tensors while the device computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from simpletuner.memory.offload.image import page_lock, whole_pages


class SideStream:
    """A stream beside the one that computes. Without CUDA, copies are synchronous and save nothing.

    The allocator does not know of it: whoever copies keeps the tensor until the copy is complete.

    Args:
        device: what computes.
        in_line: copy on the stream that computes instead.
    """

    def __init__(self, device: torch.device, *, in_line: bool = False) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and not in_line else None

    def after_compute(self, point: torch.cuda.Event | None = None) -> AbstractContextManager[object]:
        """A context in which copies wait for what has been submitted to the device up to a point, by default now."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_event(point or torch.cuda.current_stream(self.device).record_event())
        return torch.cuda.stream(self.stream)

    def complete(self) -> torch.cuda.Event | None:
        """The end of all copies so far; None if they were synchronous."""
        return None if self.stream is None else self.stream.record_event()

    def hold_compute(self, until: torch.cuda.Event | None) -> None:
        """Let the compute wait for copies."""
        if until is not None:
            torch.cuda.current_stream(self.device).wait_event(until)

    def host_memory(self, nbytes: int, owner: object | None = None) -> Tensor:
        """Bytes in host memory that stay locked until their owner, by default they themselves, is garbage-collected."""
        flat = whole_pages(nbytes)
        if self.stream is not None:
            page_lock(flat, flat if owner is None else owner)
        return flat
