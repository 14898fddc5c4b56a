"""The ring of device slots for the groups of a model, and the lanes that copy groups into slots.

    forward            ─► 0 1 2 3 4 5   each group is prefetched one group ahead,
    backward  3 2 1 0 ◄─               and evicts the group that ran before

The last groups are still in their slots when the backward pass begins, so a training step makes 2 (groups - slots)
copies. Evicting a group points its tensors at the host image again; frozen weights never change, so no data is copied
back.

A lane guarantees that a copy starts only after all previously submitted compute, which may still use the slot, and that
compute submitted after `wait` sees the complete copy. Only the disk lane blocks the host.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from simpletuner.memory.offload.beside import SideStream
from simpletuner.memory.offload.image import Span, WeightImage

# Maximum number of intervals in an unread clock, which bounds its memory.
UNREAD = 4096


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

    Intervals that are incomplete when the clock is read count in the next reading.
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


class Lane:
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
        """Start copying an image into a slot; returns a ticket for `wait`."""
        # In line, all later compute waits for the copy itself.
        with self.clock.running() if self.side.stream is None else self.side.after_compute():
            slot[: flat.numel()].copy_(flat, non_blocking=True)
        return self.side.complete()

    def wait(self, ticket: Any) -> None:
        """Make compute wait until a copy is complete."""
        if ticket is not None:
            with self.clock.running():
                self.side.hold_compute(ticket)

    def waited(self) -> float:
        """Seconds that compute waited for copies since the last call."""
        return self.clock.read()


class DiskLane(Lane):
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
        return self._reader.submit(self._read, slot, flat, torch.cuda.current_stream(self.side.device).record_event())

    def wait(self, ticket: Future[torch.cuda.Event | None]) -> None:
        with self._late.running():
            copied = ticket.result()
        super().wait(copied)

    def waited(self) -> float:
        return self._late.read() + super().waited()

    def _read(self, slot: Tensor, flat: Tensor, free: torch.cuda.Event) -> torch.cuda.Event | None:
        with torch.cuda.device(self.side.device):
            if self._copied is not None:
                self._copied.synchronize()  # before the staging buffer is overwritten; blocks only this thread
            staged = self._staging[: flat.numel()].copy_(flat)
            with self.side.after_compute(free):
                slot[: flat.numel()].copy_(staged, non_blocking=True)
            self._copied = self.side.complete()
            return self._copied


def choose_lane(device: torch.device, nbytes: int, *, use_stream: bool, on_disk: bool) -> Lane:
    """The lane for a device; `nbytes` is the size of the largest image."""
    side = SideStream(device, in_line=not use_stream)
    return DiskLane(side, nbytes) if side.stream is not None and on_disk else Lane(side)


class Streamer:
    """Copies groups to the device in the order of computation.

    Args:
        images: one per group, in the order of the forward pass.
        lane: the lane that copies.
        slots: number of groups on the device: the group that computes and the groups being copied.
    """

    def __init__(self, images: Sequence[WeightImage], lane: Lane, slots: int) -> None:
        self.images, self.lane = list(images), lane
        largest = max(image.nbytes for image in images)
        self.slots: list[Tensor] = [lane.make_slot(largest) for _ in range(min(slots, len(images)))]
        self._held: list[int | None] = [None] * len(self.slots)  # the group in each slot
        self._tickets: dict[int, Any] = {}  # groups being copied
        # Saved views are recognised by the storage they share with a slot.
        self._places = {slot.untyped_storage().data_ptr(): index for index, slot in enumerate(self.slots)}

    def enter(self, group: int) -> None:
        """Announce that compute starts a group and is done with earlier groups.

        Loads the group, if necessary, then prefetches the next groups in this direction.
        """
        if group not in self._held:
            self._load(group, {group})
        if group in self._tickets:
            self.lane.wait(self._tickets.pop(group))
            # Only now, since before the copy the slot holds other weights.
            self.images[group].bind(self.slot_of(group))
        ahead = self._ahead(group)
        for coming in ahead:
            if coming not in self._held:
                self._load(coming, {group, *ahead})

    def slot_of(self, group: int) -> Tensor:
        """The device memory of a loaded group."""
        return self.slots[self._held.index(group)]

    def group_at(self, tensor: Tensor) -> int | None:
        """The group whose slot holds a tensor; None if it is not in a slot."""
        index = self._places.get(tensor.untyped_storage().data_ptr())
        return None if index is None else self._held[index]

    def waited(self) -> float:
        """Seconds that compute waited for weights since the last call."""
        return self.lane.waited()

    def _load(self, group: int, keep: set[int]) -> None:
        """Start copying a group into a slot whose group is not in `keep`."""
        # `keep` has at most one group per slot, including the one to load, which has no slot: one slot is always free.
        index = next(index for index, held in enumerate(self._held) if held not in keep)
        evicted = self._held[index]
        if evicted is not None:
            # Before the copy starts, since no tensor may point at memory that is being overwritten.
            self.images[evicted].bind(self.images[evicted].flat)
        self._held[index] = group
        self._tickets[group] = self.lane.submit(self.slots[index], self.images[group].flat)

    def _ahead(self, group: int) -> list[int]:
        """The next groups, one per remaining slot; in reverse order inside the autograd engine.

        Without gradients, the model is called repeatedly, so the first group follows the last.
        """
        count, depth = len(self.images), len(self.slots) - 1
        if in_backward():
            return [group - step for step in range(1, depth + 1) if group - step >= 0]
        coming = [group + step for step in range(1, depth + 1)]
        if not torch.is_grad_enabled():
            return [each % count for each in coming]
        return [each for each in coming if each < count]


def in_backward() -> bool:
    """Whether this thread is in the backward pass, where activation checkpointing recomputes blocks."""
    return torch._C._current_graph_task_id() != -1


class RememberedPlaces(saved_tensors_hooks):
    """Hooks that save views of slots by position instead of by value; all other tensors are saved as usual.

    An operation reads the weights of one group only, so unpacking one group at a time suffices.
    """

    def __init__(self, streamer: Streamer) -> None:
        def pack(tensor: Tensor) -> Tensor | tuple[int, Span]:
            # Wrappers have no memory; quantised weights stream only with activation checkpointing.
            group = streamer.group_at(tensor) if type(tensor) in (Tensor, torch.nn.Parameter) else None
            if group is None:
                return tensor
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return group, Span(offset, tensor.size(), tensor.stride(), tensor.dtype)

        def unpack(saved: Tensor | tuple[int, Span]) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            group, place = saved
            streamer.enter(group)
            return place.view(streamer.slot_of(group))

        super().__init__(pack, unpack)
