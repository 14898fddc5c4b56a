"""A stream beside the compute stream, for copies and for decoding, and its events."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from simpletuner.config.schema import SLOTS
from simpletuner.memory.offload.image import page_lock, whole_pages


class SideStream:
    """A CUDA stream beside the compute stream.

    Without CUDA, copies are synchronous and save nothing. The allocator does not track it: callers
    must keep a tensor alive until its copy is complete, or pass it to `keep`.

    Args:
        device: the compute device.
        in_line: copy on the compute stream instead.
    """

    def __init__(self, device: torch.device, *, in_line: bool = False) -> None:
        self.device = device
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and not in_line:
            self.stream = torch.cuda.Stream(device)
        self._kept: deque[tuple[object, torch.cuda.Event]] = deque()

    def after_compute(self, end: torch.cuda.Event | None = None) -> AbstractContextManager[object]:
        """A context on this stream, which first waits for all compute so far.

        Args:
            end: wait only for the compute before this event of `end_of_compute`.
        """
        if self.stream is None:
            return nullcontext()
        self.stream.wait_event(end or torch.cuda.current_stream(self.device).record_event())
        return torch.cuda.stream(self.stream)

    def end_of_compute(self) -> torch.cuda.Event | None:
        """An event after all compute so far, for `after_compute` in another thread.

        The current stream is a property of the thread, so that thread cannot record the event.
        """
        if self.stream is None:
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def end_of_copies(self) -> torch.cuda.Event | None:
        """An event after all copies so far; None if they were synchronous."""
        if self.stream is None:
            return None
        return self.stream.record_event()

    def keep(self, copied: object) -> torch.cuda.Event | None:
        """Hold a reference to tensors until the copies so far are complete; returns that event.

        With `record_stream`, the allocator would reuse their memory only after the host has seen
        the event. By then, the host has launched many blocks, whose inputs all take new memory.
        Here, the compute stream waits for all but the newest copies, and later tensors reuse the
        memory of older ones.
        """
        end = self.end_of_copies()
        if end is not None:
            self._kept.append((copied, end))
            if len(self._kept) > SLOTS:
                _, oldest = self._kept[0]
                self.make_compute_wait(oldest)
        return end

    def make_compute_wait(self, end: torch.cuda.Event | None) -> None:
        """Make the compute stream wait for an event of `end_of_copies`.

        Releases the tensors that were kept until then: those of this event and of earlier ones.
        """
        if end is None:
            return
        torch.cuda.current_stream(self.device).wait_event(end)
        while any(event is end for _, event in self._kept):
            self._kept.popleft()

    def finish(self) -> None:
        """Block the host until all copies are complete."""
        if self.stream is not None:
            self.stream.synchronize()
        self._kept.clear()

    def host_memory(self, nbytes: int, owner: object | None = None) -> Tensor:
        """Pinned host memory, unlocked when its owner is garbage-collected.

        Args:
            owner: by default the tensor itself.
        """
        flat = whole_pages(nbytes)
        if self.stream is not None:
            page_lock(flat, flat if owner is None else owner)
        return flat
