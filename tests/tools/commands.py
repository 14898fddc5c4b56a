"""`simpletuner` as processes that start at once: forked with everything imported, which takes
longer than most of them.

What starts one (a server, a page) is given `Commands.program` in place of `python -m simpletuner`.
That is a small program which sends its arguments, folder, environment and streams to a process
here, and ends as the fork does. Whoever starts it has a process to wait for and to signal, as with
the real one.
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
from tests.tools.workspace import FORKS

MOST_BYTES = 100_000  # of a command with its environment
# variable of the environment: a run that others look at leaves them the processor
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
    """What starts `simpletuner` in place of `(python, "-m", "simpletuner")`.

    Args:
        folder: for files of its own.
        work: another program.
        prepare: what is done once, in the process that is forked.
    """
    (folder / "client.py").write_text(CLIENT)
    address = folder / "door"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(address))
        listener.listen()
        process = FORKS.Process(target=_fork_for_each, args=(listener, work, prepare))
        process.start()
    try:
        yield sys.executable, "-S", "-E", str(folder / "client.py"), str(address)
    finally:
        process.kill()
        process.join()


def _fork_for_each(
    listener: socket.socket, work: Callable[[], object], prepare: Callable[[], object] | None
) -> None:
    if prepare is not None:
        prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombie stays
    parent = parent_process()
    assert parent is not None
    while listener in connection.wait([listener, parent.sentinel]):  # until the parent has ended
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _obey(client, work)
        client.close()


def _obey(client: socket.socket, work: Callable[[], object]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()  # the terminal's Ctrl-C reaches the client, as it does the real command
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
    with suppress(
        OSError
    ):  # whoever asked may be gone, as the page is when a newer plan replaces this one
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        client.send(str(code).encode())
    os._exit(code)


def _slow_down(seconds: float) -> None:
    append = MetricsFile.append

    def slowly(self: MetricsFile, step: int, metrics: Mapping[str, Any]) -> None:
        append(self, step, metrics)
        time.sleep(seconds)

    MetricsFile.append = slowly
