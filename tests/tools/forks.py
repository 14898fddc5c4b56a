"""Processes of tests that are forked with everything imported, and are noticed when they hang."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from weakref import WeakKeyDictionary

import psutil

# Importing everything takes longer than a tiny run.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.tools.preload"])

# What `slowness` imports, and the seconds for it on an idle machine of 2024.
MODULES = "asyncio, email.message, http.client, unittest.mock"
IMPORT_SECONDS = 0.1

STALL_SECONDS = 60.0
# The share of a CPU below which processes do not get on: threads that only watch use less.
IDLE_SHARE = 0.02
CHECKS = 60  # at most so many before processes have stalled

DUMP = signal.SIGUSR2  # on it, a fork writes where its threads stand
DUMP_SECONDS = 2.0

_stacks: WeakKeyDictionary[BaseProcess, Connection] = WeakKeyDictionary()


def slowness() -> float:
    """How many times longer than usual work takes on this machine now."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", f"import {MODULES}"], check=True)
    return max(1.0, (time.monotonic() - started) / IMPORT_SECONDS)


def fork(work: Callable[..., object], *arguments: object) -> BaseProcess:
    """Start `work(*arguments)` in a fresh process."""
    stacks, written = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_work, args=(written, work, arguments))
    process.start()
    written.close()
    _stacks[process] = stacks
    return process


def _work(stacks: Connection, work: Callable[..., object], arguments: Sequence[object]) -> None:
    faulthandler.register(DUMP, stacks)
    work(*arguments)


class Progress:
    """Whether forks, with all that they have started, get on, which takes CPU time.

    Processes that wait for each other take next to none.

    Args:
        stall_seconds: how long they may do nothing; longer while this machine is slow.
    """

    def __init__(
        self, processes: Sequence[BaseProcess], stall_seconds: float = STALL_SECONDS
    ) -> None:
        self.interval = stall_seconds / CHECKS
        self._processes = processes
        self._limit = stall_seconds
        self._used: dict[int, float] = {}  # CPU seconds, by process id
        self._before = 0.0
        self._since = time.monotonic()
        self._checked = self._since

    def check(self) -> None:
        """Fail, with the stacks of all processes, if they have stalled."""
        now = time.monotonic()
        if now - self._checked < self.interval:
            return
        self._checked = now
        used = self._cpu_seconds()
        if used - self._before > IDLE_SHARE * self._limit:
            self._before = used
            self._since = now
        waited = now - self._since
        # The slowness comes last, since measuring it takes a while.
        if waited > self._limit and waited > self._limit * slowness():
            raise AssertionError(
                f"The processes have used next to no CPU time for {waited:.0f} seconds.\n"
                + "\n".join(self._positions())
            )

    def _cpu_seconds(self) -> float:
        """CPU time so far, also of processes that have ended since the last call."""
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                for running in (root, *root.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        times = running.cpu_times()
                        self._used[running.pid] = times.user + times.system
        return sum(self._used.values())

    def _positions(self) -> list[str]:
        """What each process does."""
        positions = []
        for rank, process in enumerate(self._processes):
            if process.is_alive():
                positions.append(f"Rank {rank} stands here:\n{_stack(process)}")
            else:
                positions.append(f"Rank {rank} has ended with exit code {process.exitcode}.")
        return positions


def _stack(process: BaseProcess) -> str:
    """Where the threads of a fork stand."""
    assert process.pid is not None
    stacks = _stacks[process]
    os.kill(process.pid, DUMP)
    text = b""
    while stacks.poll(DUMP_SECONDS if not text else DUMP_SECONDS / 10):
        text += os.read(stacks.fileno(), 2**16)
    if not text:
        return "(no answer)"
    # Its first frames are those of multiprocessing and of the test session that it was forked from.
    return text.decode(errors="replace").partition(f" in {_work.__name__}\n")[0]
