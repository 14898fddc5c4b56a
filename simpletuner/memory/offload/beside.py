"""The side stream for copies between host and device while the device computes."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from simpletuner.config.schema import SLOTS
from simpletuner.memory.offload.image import page_lock, whole_pages


class SideStream:
    """A CUDA stream beside the compute stream. Without CUDA, copies are synchronous and save nothing.

    The allocator does not track it: callers must keep a tensor alive until its copy is complete, or pass it to `keep`.

    Args:
        device: the compute device.
        in_line: copy on the compute stream instead.
    """

    def __init__(self, device: torch.device, *, in_line: bool = False) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and not in_line else None
        self._kept: deque[tuple[object, torch.cuda.Event]] = deque()

    def after_compute(self, point: torch.cuda.Event | None = None) -> AbstractContextManager[object]:
        """A context in which copies wait for work submitted to the device before `point`, by default before now."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_event(point or torch.cuda.current_stream(self.device).record_event())
        return torch.cuda.stream(self.stream)

    def complete(self) -> torch.cuda.Event | None:
        """An event that marks the end of all copies so far; None if they were synchronous."""
        return None if self.stream is None else self.stream.record_event()

    def keep(self, copied: object) -> torch.cuda.Event | None:
        """Hold a reference to tensors until the copies so far are complete; returns that event.

        With `record_stream`, the allocator would reuse their memory only after the host has seen the event. By then,
        the host has launched many blocks, whose inputs all take new memory. Here, the compute stream waits for all but
        the newest copies, and later tensors reuse the memory of older ones.
        """
        complete = self.complete()
        if complete is not None:
            self._kept.append((copied, complete))
            if len(self._kept) > SLOTS:
                self.hold_compute(self._kept[0][1])
        return complete

    def hold_compute(self, until: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for copies, and release the tensors kept for them."""
        if until is not None:
            torch.cuda.current_stream(self.device).wait_event(until)
            while any(event is until for _, event in self._kept):
                self._kept.popleft()

    def finish(self) -> None:
        """Block the host until all copies are complete."""
        if self.stream is not None:
            self.stream.synchronize()
        self._kept.clear()

    def host_memory(self, nbytes: int, owner: object | None = None) -> Tensor:
        """Pinned host memory, unlocked when `owner`, by default the tensor itself, is garbage-collected."""
        flat = whole_pages(nbytes)
        if self.stream is not None:
            page_lock(flat, flat if owner is None else owner)
        return flat
