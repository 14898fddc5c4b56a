"""Copies the image of a group into a slot on the device.

A lane guarantees that a copy starts only after all compute submitted before it, which may still use the slot, and that
compute submitted after `wait` sees the complete copy. Only the lane from disk blocks the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

# Waits that an unread clock keeps at most, so that its memory stays bounded.
UNREAD = 4096


class Lane(Protocol):
    """Copies images into slots."""

    def make_slot(self, nbytes: int) -> Tensor:
        """Allocate device memory for one group."""

    def submit(self, slot: Tensor, flat: Tensor) -> Any:
        """Start to copy an image into a slot; returns a ticket to wait for."""

    def wait(self, ticket: Any) -> None:
        """Make the compute wait until a copy is complete."""

    def waited(self) -> float:
        """Seconds that the compute waited for copies since the last call."""


class HostClock:
    """Measures time on the host."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    def read(self) -> float:
        """Seconds since the last reading."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class StreamClock:
    """Measures time on a CUDA stream without synchronising.

    Intervals that are not complete when the clock is read count in the next reading.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=UNREAD)

    @contextmanager
    def running(self) -> Iterator[None]:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        yield
        after.record()
        self._pairs.append((before, after))

    def read(self) -> float:
        """Seconds since the last reading."""
        milliseconds = 0.0
        while self._pairs and self._pairs[0][1].query():
            before, after = self._pairs.popleft()
            milliseconds += before.elapsed_time(after)
        return milliseconds / 1000


class InlineLane:
    """Copies in line with the compute: on a CPU, on MPS, or on CUDA's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = StreamClock() if device.type == "cuda" else HostClock()

    def make_slot(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def submit(self, slot: Tensor, flat: Tensor) -> None:
        with self.clock.running():
            slot[: flat.numel()].copy_(flat, non_blocking=True)

    def wait(self, ticket: None) -> None:
        """Nothing to wait for: the copy precedes all later compute."""

    def waited(self) -> float:
        return self.clock.read()


class CudaLane:
    """Copies on a side stream, ordered with the compute by events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)
        self.clock = StreamClock()

    def make_slot(self, nbytes: int) -> Tensor:
        slot = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        slot.record_stream(self.side)  # the allocator must not reuse it while a copy writes to it
        return slot

    def submit(self, slot: Tensor, flat: Tensor) -> Any:
        return self._copy(slot, flat, torch.cuda.current_stream(self.device).record_event())

    def wait(self, ticket: Any) -> None:
        with self.clock.running():
            torch.cuda.current_stream(self.device).wait_event(ticket)

    def waited(self) -> float:
        return self.clock.read()

    def _copy(self, slot: Tensor, flat: Tensor, free: torch.cuda.Event) -> torch.cuda.Event:
        self.side.wait_event(free)
        with torch.cuda.stream(self.side):
            slot[: flat.numel()].copy_(flat, non_blocking=True)
        return self.side.record_event()


class DiskLane(CudaLane):
    """For images on disk: a thread reads each into page-locked memory, from where it is copied to the device.

    `wait` blocks the host until the disk has been read.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        super().__init__(device)
        self._staging = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._copied: torch.cuda.Event | None = None
        self._reader = ThreadPoolExecutor(1, "offload-reader")
        self._late = HostClock()

    def submit(self, slot: Tensor, flat: Tensor) -> Future[torch.cuda.Event]:
        free = torch.cuda.current_stream(self.device).record_event()
        return self._reader.submit(self._read, slot, flat, free)

    def wait(self, ticket: Future[torch.cuda.Event]) -> None:
        with self._late.running():
            copied = ticket.result()
        super().wait(copied)

    def waited(self) -> float:
        return self._late.read() + super().waited()

    def _read(self, slot: Tensor, flat: Tensor, free: torch.cuda.Event) -> torch.cuda.Event:
        with torch.cuda.device(self.device):
            if self._copied is not None:
                self._copied.synchronize()  # before the staging buffer is overwritten; blocks this thread only
            staged = self._staging[: flat.numel()].copy_(flat)
            self._copied = self._copy(slot, staged, free)
            return self._copied


def choose_lane(device: torch.device, nbytes: int, *, use_stream: bool, on_disk: bool) -> Lane:
    """The lane for a device; `nbytes` is the size of the largest image."""
    if device.type != "cuda" or not use_stream:
        return InlineLane(device)
    return DiskLane(device, nbytes) if on_disk else CudaLane(device)
