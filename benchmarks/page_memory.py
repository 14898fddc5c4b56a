"""Memory of the page's server with long runs and clients that ask for all events and do not read them.

Every part of every run is asked for, and the curves of all by many at once. What the server holds at its highest is
what counts, because a program seldom gives memory back.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from simpletuner.reporting.events import EventStream, StateChanged, StepDone
from simpletuner.reporting.metrics import METRICS_FILE
from simpletuner.reporting.payloads import EVENTS_FILE, EventLog, Payloads
from simpletuner.run.records import row_of

BAR = 200  # MB
METRICS = dict.fromkeys(("train_loss", "learning_rate", "grad_norm", "grad_absmax", "crepa_loss"), 0.123456789)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=10, help="of all events, which do not read")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for number in range(options.runs):
            write_run(Path(name) / f"run-{number}", options.steps)
        with serving(Path(name)) as (process, port):
            measure(process.pid, port, options.clients)


def write_run(folder: Path, steps: int) -> None:
    """The record and events of a run: those of one step, repeated."""
    folder.mkdir()
    events = EventStream(EventLog(folder, Payloads(every=0)))
    step = StepDone(1, 1, METRICS, 2.0, 0.01, 0.1, 0.4, 2**34, 2**35, timesteps=[123.4, 567.8])
    for event in (StateChanged("starting", 0, steps), StateChanged("running", 0, steps), step):
        events.publish(event)
    log = folder / EVENTS_FILE
    *first, last = log.read_text().splitlines()
    repeated = (f'{{"id": {each + 2},{last.partition(",")[2]}' for each in range(1, steps))
    log.write_text("".join(f"{line}\n" for line in (*first, *repeated)))
    row = json.dumps(row_of(step))[1:]
    (folder / METRICS_FILE).write_text("".join(f'{{"step": {each}, {row}\n' for each in range(1, steps)))


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`simpletuner server` of a folder, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "simpletuner", "server", "--port", str(port)]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process, port
        finally:
            process.terminate()


def measure(pid: int, port: int, clients: int) -> None:
    """Ask for everything, and print what the server holds after each round."""

    def get(path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", path)
        return connection.getresponse().read().decode()

    def show(what: str, since: float) -> None:
        now, most = (memory_of(pid, name) for name in ("VmRSS", "VmHWM"))
        print(f"{what:<28}{time.monotonic() - since:6.1f} s {now:6.0f} MB now {most:6.0f} MB at most")

    began = time.monotonic()
    show("start", began)
    runs = re.findall(r'data-run="([^"]+)"', get("/runs"))
    show("list of runs", began)
    for part in ("head", "curves", "previews", "log"):
        for run in runs:
            get(f"/runs/{run}/{part}")
        show(part, began)
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(clients)]
    for number, client in enumerate(silent):
        path = f"/api/training/events?run={runs[number % len(runs)]}"
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\nLast-Event-ID: 0\r\n\r\n".encode())
    time.sleep(10)
    show(f"{clients} silent clients", began)
    with ThreadPoolExecutor(9) as pool:
        list(pool.map(lambda number: get(f"/runs/{runs[number % len(runs)]}/curves"), range(9)))
    show("nine curves at once", began)
    for client in silent:
        client.close()
    print(f"at most {BAR} MB are wanted")


def memory_of(pid: int, name: str) -> float:
    """A line of /proc/PID/status, in MB."""
    [line] = [each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith(name)]
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
