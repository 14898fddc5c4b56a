"""The order that the CUDA lanes ask for, told by stand-ins for streams and events; numbers need a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from simpletuner.memory.offload import attach, lane
from tests.memory.streaming import CPU, Trained, assert_equal

GPU = torch.device("cuda")


class Cuda:
    """Notes what streams are asked to do. Waiting of the host is only allowed to the thread that reads the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.events = 0
        self.compute, self.side = Stream("compute", self), Stream("side", self)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.compute)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "device", self.on)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self, timing=enable_timing))
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *size, device=None, pin_memory=False, **more: empty(*size, **more))

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        if stream is self.side:
            self.log.append("copy on side")
        yield


class Event:
    def __init__(self, cuda: Cuda, *, timing: bool = False) -> None:
        self.cuda, self.timing, self.done = cuda, timing, False
        cuda.events += 1
        self.number = cuda.events

    def record(self) -> None:
        assert self.timing

    def query(self) -> bool:
        return self.done

    def elapsed_time(self, other: Event) -> float:
        return 250.0

    def synchronize(self) -> None:
        self.cuda.log.append(f"host waits for {self.number}")


class Stream:
    def __init__(self, name: str, cuda: Cuda) -> None:
        self.name, self.cuda = name, cuda

    def record_event(self) -> Event:
        event = Event(self.cuda)
        self.cuda.log.append(f"{self.name} marks {event.number}")
        return event

    def wait_event(self, event: Event) -> None:
        self.cuda.log.append(f"{self.name} waits for {event.number}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def bytes_of(value: int) -> Tensor:
    return torch.full((8,), value, dtype=torch.uint8)


def test_a_copy_waits_for_the_compute_and_the_compute_for_the_copy(cuda: Cuda) -> None:
    beside, slot = lane.CudaLane(GPU), bytes_of(0)
    ticket = beside.submit(slot, bytes_of(7)[:5])
    assert cuda.log == ["compute marks 1", "side waits for 1", "copy on side", "side marks 2"]
    assert slot.tolist() == [7] * 5 + [0] * 3
    beside.wait(ticket)
    assert cuda.log[4:] == ["compute waits for 2"], "and the host waits for nothing"


def test_waiting_is_counted_when_it_is_over(cuda: Cuda) -> None:
    beside = lane.CudaLane(GPU)
    for _ in range(2):
        beside.wait(beside.submit(bytes_of(0), bytes_of(1)))
    assert beside.waited() == 0, "nothing has happened yet, and asking does not wait"
    for _, after in list(beside.clock._pairs)[:1]:
        after.done = True
    assert beside.waited() == 0.25
    assert beside.waited() == 0
    for _, after in beside.clock._pairs:
        after.done = True
    assert beside.waited() == 0.25


def test_from_disk_the_staging_buffer_is_left_before_it_is_filled(cuda: Cuda) -> None:
    from_disk, slots = lane.DiskLane(GPU, 8), [bytes_of(0), bytes_of(0)]
    tickets = [from_disk.submit(slot, bytes_of(value)) for slot, value in zip(slots, (5, 6), strict=True)]
    for ticket in tickets:
        from_disk.wait(ticket)
    assert [slot.tolist() for slot in slots] == [[5] * 8, [6] * 8]
    assert sum(line.startswith("host waits") for line in cuda.log) == 1, "the reader, for the first copy"
    marks = [line for line in cuda.log if line.startswith("side marks")]
    assert [f"compute waits for {mark.split()[-1]}" for mark in marks] == [
        line for line in cuda.log if line.startswith("compute waits")
    ]


def test_a_whole_step_through_the_lane_beside(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here(lane.CudaLane):
        def make_slot(self, nbytes: int) -> Tensor:
            return torch.zeros(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(attach, "choose_lane", lambda *place, **settings: Here(GPU))
    plain, streamed = Trained(), Trained()
    streamed.offloaded(device=CPU)
    assert_equal(streamed.step(), plain.step())
    assert sum(line == "copy on side" for line in cuda.log) == 10
    assert not [line for line in cuda.log if line.startswith("host")]
