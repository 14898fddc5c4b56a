"""Copiers, which copy the images of groups into slots on the device.

A copier guarantees that a copy starts only after all previously submitted compute, which may still
use the slot, and that compute submitted after `wait` sees the complete copy. Only the copier from
disk blocks the host.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from simpletuner.memory.offload.side_stream import SideStream
from simpletuner.timing import HostClock, StreamClock


class Copier:
    """Copies images into slots, on a side stream, or in line with compute, as on a CPU.

    Args:
        side: the stream of the copies.
    """

    def __init__(self, side: SideStream) -> None:
        self.side = side
        self.clock = StreamClock() if side.device.type == "cuda" else HostClock()

    def make_slot(self, nbytes: int) -> Tensor:
        """Allocate device memory for one group."""
        slot = torch.empty(nbytes, dtype=torch.uint8, device=self.side.device)
        if self.side.stream is not None:
            slot.record_stream(self.side.stream)  # prevents reuse while a copy writes to it
        return slot

    def submit(self, slot: Tensor, flat: Tensor) -> Any:
        """Start copying an image into a slot; returns the pending copy, for `wait`."""
        if self.side.stream is None:
            around: AbstractContextManager[object] = self.clock.running()  # compute waits for it
        else:
            around = self.side.after_compute()
        with around:
            slot[: flat.numel()].copy_(flat, non_blocking=True)
        return self.side.end_of_copies()

    def wait(self, copy: Any) -> None:
        """Make compute wait until a pending copy is complete."""
        if copy is not None:
            with self.clock.running():
                self.side.make_compute_wait(copy)

    def waited(self) -> float:
        """Seconds that compute waited for copies since the last call."""
        return self.clock.read()


class DiskCopier(Copier):
    """For images on disk: a thread reads an image into pinned memory, then copies it to the device.

    `wait` blocks the host until the disk read is complete.
    """

    def __init__(self, side: SideStream, nbytes: int) -> None:
        super().__init__(side)
        self._staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._copied: torch.cuda.Event | None = None
        # A single thread, since reads share the staging buffer and must keep their order.
        self._reader = ThreadPoolExecutor(1, "offload-reader")
        self._late = HostClock()

    def submit(self, slot: Tensor, flat: Tensor) -> Future[torch.cuda.Event | None]:
        # Recorded here, since the current stream is per thread.
        return self._reader.submit(self._read, slot, flat, self.side.end_of_compute())

    def wait(self, copy: Future[torch.cuda.Event | None]) -> None:
        with self._late.running():
            copied = copy.result()
        super().wait(copied)

    def waited(self) -> float:
        return self._late.read() + super().waited()

    def _read(
        self, slot: Tensor, flat: Tensor, free: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        with torch.cuda.device(self.side.device):
            if self._copied is not None:
                # The last copy must have read the staging buffer. Blocks only this thread.
                self._copied.synchronize()
            staged = self._staging[: flat.numel()].copy_(flat)
            with self.side.after_compute(free):
                slot[: flat.numel()].copy_(staged, non_blocking=True)
            self._copied = self.side.end_of_copies()
            return self._copied


def choose_copier(device: torch.device, nbytes: int, *, use_stream: bool, on_disk: bool) -> Copier:
    """The copier for a device; `nbytes` is the size of the largest image."""
    side = SideStream(device, in_line=not use_stream)
    if side.stream is not None and on_disk:
        return DiskCopier(side, nbytes)
    return Copier(side)
