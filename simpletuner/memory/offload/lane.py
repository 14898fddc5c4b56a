"""How the image of a group gets into a slot on the device.

A lane promises two things: a copy begins when everything that the compute has been given so far is done with the
slot, and what the compute is given after `wait` finds the copy complete. No lane but the one from disk ever lets the
host wait.
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

# Of an unread clock, only so many waits are kept: somebody who never asks must not pay with memory.
UNREAD = 4096


class Lane(Protocol):
    """Copies images into slots."""

    def make_slot(self, nbytes: int) -> Tensor:
        """Room for one group on the device."""
        ...

    def submit(self, slot: Tensor, flat: Tensor) -> Any:
        """Begin to copy an image into a slot; returns a ticket to wait for."""
        ...

    def wait(self, ticket: Any) -> None:
        """Let the compute wait until a copy is complete."""
        ...

    def waited(self) -> float:
        """Seconds the compute waited for copies since this was last asked."""
        ...


class HostClock:
    """Measures work that the host does itself."""

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
    """Measures how long a CUDA stream takes between two points, without waiting for either.

    What has not happened when the clock is read belongs to the next reading.
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
    """Copies where the compute runs, at the moment of submission: on a CPU, on MPS, or on CUDA's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = StreamClock() if device.type == "cuda" else HostClock()

    def make_slot(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def submit(self, slot: Tensor, flat: Tensor) -> None:
        with self.clock.running():
            slot[: flat.numel()].copy_(flat, non_blocking=True)

    def wait(self, ticket: None) -> None:
        """The copy stands before whatever comes now."""

    def waited(self) -> float:
        return self.clock.read()


class CudaLane:
    """Copies on a stream beside the compute; events order the two."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)
        self.clock = StreamClock()

    def make_slot(self, nbytes: int) -> Tensor:
        slot = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        slot.record_stream(self.side)  # its memory is not given away while a copy may still write to it
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
    """The same for images on disk: a thread reads each into page-locked memory, and the copy goes on from there.

    Here the host waits: at `wait`, until the disk has delivered.
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
                self._copied.synchronize()  # in this thread: the last copy must have left the staging buffer
            staged = self._staging[: flat.numel()].copy_(flat)
            self._copied = self._copy(slot, staged, free)
            return self._copied


def choose_lane(device: torch.device, nbytes: int, *, use_stream: bool, on_disk: bool) -> Lane:
    """The lane for a device; `nbytes` is the size of the largest image."""
    if device.type != "cuda" or not use_stream:
        return InlineLane(device)
    return DiskLane(device, nbytes) if on_disk else CudaLane(device)
