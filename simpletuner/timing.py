"""Clocks: time on the host, time on a CUDA stream, and the fastest of several rounds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# Maximum number of intervals in an unread clock, which bounds its memory.
UNREAD = 4096


class HostClock:
    """Measures time on the host."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context whose duration counts."""
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    def read(self) -> float:
        """Seconds since the last reading."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds


class StreamClock:
    """Measures time on a CUDA stream without synchronising.

    Intervals that are incomplete when the clock is read count in the next reading.
    """

    def __init__(self) -> None:
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=UNREAD)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context whose work on the stream counts."""
        before = torch.cuda.Event(enable_timing=True)
        after = torch.cuda.Event(enable_timing=True)
        before.record()
        yield
        after.record()
        self._pairs.append((before, after))

    def read(self) -> float:
        """Seconds since the last reading."""
        milliseconds = 0.0
        while self._pairs:
            before, after = self._pairs[0]
            if not after.query():  # the device has not reached it yet, nor the later ones
                break
            milliseconds += before.elapsed_time(after)
            self._pairs.popleft()
        return milliseconds / 1000


def fastest(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of the fastest round, after a warm-up round."""
    seconds = []
    for _ in range(rounds + 1):
        started = _now(device)
        work()
        seconds.append(_now(device) - started)
    return min(seconds[1:])


def _now(device: torch.device) -> float:
    """The time on the host when the device has finished all work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    return time.perf_counter()
