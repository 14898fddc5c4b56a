"""Several processes of one run, as a launcher starts them, but in no time: they are forked with
everything imported.
"""

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
from simpletuner.distributed.world import World, usable_cores
from tests.tools.workspace import FORKS, Workspace

LOOP_SECONDS = 0.02  # of CPU time for the loop of `slowness` on a machine of 2024


def slowness() -> float:
    """How many times longer than usual something takes on this machine now: by a short loop, and by
    the load.
    """
    started = time.process_time()
    for _ in range(1_000_000):
        pass
    loop = (time.process_time() - started) / LOOP_SECONDS
    load = os.getloadavg()[0] / usable_cores()
    return max(1.0, loop) * max(1.0, load)


# Seconds for what takes a few on an idle machine, so that a collective that hangs costs about a
# minute.
PATIENCE = 60 * slowness()
_ports: list[socket.socket] = []


def free_port() -> int:
    """A port on which only the caller will listen: it stays bound here, so that no other process is
    given it.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    _ports.append(holder)
    return int(holder.getsockname()[1])


def start(
    workspaces: Sequence[Workspace], *arguments: str, each: Sequence[Sequence[str]] = ()
) -> list[BaseProcess]:
    """`simpletuner <arguments>` in one process per workspace, all of which may be the same.

    What a process prints is in `rank<N>.txt` of its workspace.

    Args:
        each: further arguments of each process.
    """
    port = free_port()
    places = range(len(workspaces))
    extras = each or [()] * len(workspaces)
    return [
        workspaces[rank].fork(run_as, rank, len(workspaces), port, [*arguments, *extras[rank]])
        for rank in places
    ]


def finish(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Wait for processes; returns their exit codes."""
    for process in processes:
        process.join(PATIENCE)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def train(workspace: Workspace, size: int, *settings: str) -> list[int | None]:
    """`simpletuner train <settings>` in some processes; returns their exit codes."""
    return finish(start([workspace] * size, "train", *settings))


def run_together(size: int, work: Callable[..., object], *arguments: object) -> None:
    """`work(its place, *arguments)` in some processes; if one of them fails, the others do not wait
    for it.
    """
    started = [
        FORKS.Process(target=work, args=(World(rank, size, rank, size), *arguments))
        for rank in range(size)
    ]
    for process in started:
        process.start()
    try:
        while all(process.exitcode in (None, 0) for process in started):
            running = [process.sentinel for process in started if process.exitcode is None]
            if not running or not connection.wait(running, PATIENCE):
                break
    finally:
        for process in started:
            process.kill()
            process.join()
    assert [process.exitcode for process in started] == [0] * size


def printed(workspace: Workspace, rank: int = 0) -> str:
    """What a process printed."""
    return workspace.path(f"rank{rank}.txt").read_text()


def run_as(rank: int, size: int, port: int, arguments: list[str]) -> None:
    """`simpletuner <arguments>` as one of `size` processes, which meet at a port."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update(
        {name: str(value) for name, value in place.items()},
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    run_into(f"rank{rank}.txt", arguments)


def run_into(file: str, arguments: list[str], *, leave: bool = True) -> None:
    """`simpletuner <arguments>` as all that this process does; it and its children print into a
    file.

    Args:
        leave: end this process with the exit code; otherwise only if that is not 0.
    """
    output = Path(file).open("w")  # noqa: SIM115 - until the process ends
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    code = main(arguments)
    if leave or code:
        sys.exit(code)
