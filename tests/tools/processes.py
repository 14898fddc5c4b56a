"""Several processes of one run, as a launcher starts them, but forked with everything imported."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from simpletuner.cli.app import main
from simpletuner.distributed.world import World
from tests.tools.forks import STALL_SECONDS, Progress, fork, slowness
from tests.tools.workspace import Workspace

# Seconds within which threads, servers and programs must answer. Forks are watched instead.
PATIENCE = 60 * slowness()
_ports: list[socket.socket] = []


def free_port() -> int:
    """A port on which only the caller will listen."""
    holder = socket.socket()
    # It stays bound here, so that the system gives it to no other process.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _ports.append(holder)
    return int(holder.getsockname()[1])


def start(
    workspaces: Sequence[Workspace], *arguments: str, extras: Sequence[Sequence[str]] = ()
) -> list[BaseProcess]:
    """Start `simpletuner <arguments>` in one process per workspace, all of which may be the same.

    What a process prints is in `rank<N>.txt` of its workspace.

    Args:
        extras: further arguments of each process.
    """
    port = free_port()
    size = len(workspaces)
    processes = []
    for rank, workspace in enumerate(workspaces):
        own_arguments = [*arguments, *extras[rank]] if extras else [*arguments]
        processes.append(workspace.fork(run_as, rank, size, port, own_arguments))
    return processes


def finish(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Wait until all processes have ended; returns their exit codes."""
    _join(processes, lambda: False)
    return [process.exitcode for process in processes]


def train(workspace: Workspace, size: int, *settings: str) -> list[int | None]:
    """Run `simpletuner train <settings>` in several processes; returns their exit codes."""
    return finish(start([workspace] * size, "train", *settings))


def run_together(
    size: int,
    work: Callable[..., object],
    *arguments: object,
    stall_seconds: float = STALL_SECONDS,
) -> None:
    """Run `work(world, *arguments)` in several processes, and check that all of them succeed."""
    processes = [fork(work, World(rank, size, rank, size), *arguments) for rank in range(size)]

    def one_has_failed() -> bool:  # for which the others would wait
        return any(process.exitcode not in (None, 0) for process in processes)

    _join(processes, one_has_failed, stall_seconds)
    assert [process.exitcode for process in processes] == [0] * size


def _join(
    processes: Sequence[BaseProcess],
    enough: Callable[[], bool],
    stall_seconds: float = STALL_SECONDS,
) -> None:
    """Wait until all processes have ended, or enough have; kill the rest, and fail if they hang."""
    progress = Progress(processes, stall_seconds)
    try:
        while not enough():
            running = [process.sentinel for process in processes if process.exitcode is None]
            if not running:
                break
            connection.wait(running, progress.interval)
            progress.check()
    finally:
        for process in processes:
            process.kill()
            process.join()


def wait_for(condition: Callable[[], bool], output: Path, processes: Sequence[BaseProcess]) -> None:
    """Wait until a condition holds; fail if a process ends, with the output, or if all hang."""
    progress = Progress(processes)
    while not condition():
        progress.check()
        assert all(process.is_alive() for process in processes), output.read_text()
        time.sleep(0.02)


def wait_for_step(
    workspace: Workspace, step: int, output: Path, processes: Sequence[BaseProcess]
) -> None:
    """Wait until the record of a run has a line for this step."""
    record = workspace.path("output/training_metrics.jsonl")

    def is_recorded() -> bool:
        return record.exists() and len(record.read_text().splitlines()) >= step

    wait_for(is_recorded, output, processes)


def printed(workspace: Workspace, rank: int = 0) -> str:
    """What a process printed."""
    return workspace.path(f"rank{rank}.txt").read_text()


def run_as(rank: int, size: int, port: int, arguments: list[str]) -> None:
    """Run `simpletuner <arguments>` as one of `size` processes, which meet at a port."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    for name, value in variables.items():
        os.environ[name] = str(value)
    run_into(f"rank{rank}.txt", arguments)


def run_into(file: str, arguments: list[str], *, leave: bool = True) -> None:
    """Run `simpletuner <arguments>` in this process, which prints into a file.

    Args:
        leave: end this process with the exit code; otherwise only if that is not 0.
    """
    output = Path(file).open("w")  # noqa: SIM115 - until the process ends
    # The descriptors, so that children and libraries print there too.
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    code = main(arguments)
    if leave or code:
        sys.exit(code)
