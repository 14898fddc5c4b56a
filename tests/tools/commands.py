"""`simpletuner` as a process that starts at once, since it is forked with everything imported.

A test gives a server or page the program of `forked_commands` in place of `python -m simpletuner`.
That is a small client, which sends its arguments, folder, environment and streams to a process
here; this forks, runs the command, and the client ends as the fork does. Whoever starts the client
can wait for it and signal it like the real command.
"""

from __future__ import annotations

import marshal
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, NoReturn

from simpletuner.cli.app import run
from simpletuner.reporting.metrics import MetricsFile
from tests.tools.forks import FORKS

MOST_BYTES = 100_000  # of a command with its environment
# Environment variable: seconds by which a run slows down its steps, to leave the CPU to the test
# that watches it.
PACE = "SECONDS_A_STEP"
CLIENT = """
import marshal, os, signal, socket, sys
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
door.connect(sys.argv[1])
socket.send_fds(door, [marshal.dumps((sys.argv[2:], os.getcwd(), dict(os.environ)))], [0, 1, 2])
pid = int(door.recv(20))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
sys.exit(int(door.recv(20) or 128 + signal.SIGKILL))
"""


@contextmanager
def forked_commands(
    folder: Path, work: Callable[[], object] = run, prepare: Callable[[], object] | None = None
) -> Iterator[tuple[str, ...]]:
    """The beginning of a command line, in place of `(python, "-m", "simpletuner")`.

    Args:
        folder: a folder for the files of this context.
        work: what a command runs.
        prepare: called once, in the process that is forked for every command.
    """
    (folder / "client.py").write_text(CLIENT)
    address = folder / "door"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()
        process = FORKS.Process(target=_fork_for_every_client, args=(listener, work, prepare))
        process.start()
    try:
        yield sys.executable, "-S", "-E", str(folder / "client.py"), str(address)
    finally:
        process.kill()
        process.join()


def _fork_for_every_client(
    listener: socket.socket, work: Callable[[], object], prepare: Callable[[], object] | None
) -> None:
    """Serve clients until the process that started this one has ended."""
    if prepare is not None:
        prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that no zombie stays
    parent = parent_process()
    assert parent is not None
    while listener in connection.wait([listener, parent.sentinel]):
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _serve(client, work)
        client.close()


def _serve(client: socket.socket, work: Callable[[], object]) -> NoReturn:
    """Become the command of a client, and send it the process id and the exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # the terminal's Ctrl-C reaches the client, which passes it on
    content, streams, _, _ = socket.recv_fds(client, MOST_BYTES, 3)
    sys.argv[1:], folder, environment = marshal.loads(content)
    for number, handle in enumerate(streams):
        os.dup2(handle, number)
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if PACE in environment:
        _slow_down(float(environment[PACE]))
    client.send(str(os.getpid()).encode())
    code = 1
    try:
        work()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:  # noqa: BLE001 - nothing of the process that forked this may run on
        traceback.print_exc()
    # The client may be gone, as the page is when a newer plan replaces this one.
    with suppress(OSError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        client.send(str(code).encode())
    os._exit(code)


def _slow_down(seconds: float) -> None:
    """Let every step of a run in this process take some seconds more."""
    append = MetricsFile.append

    def slowly(self: MetricsFile, step: int, metrics: Mapping[str, Any]) -> None:
        append(self, step, metrics)
        time.sleep(seconds)

    MetricsFile.append = slowly
