"""Connects the processes of a run: a store, the watch, then process groups for tensors and values.

The resulting `ConnectedWorld` exchanges values and counts, and the reason why a process failed.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

from simpletuner.annexes.processes.watch import (
    GRACE_SECONDS,
    POLL_SECONDS,
    Beat,
    EndReporter,
    Link,
    Watch,
)
from simpletuner.distributed.requests import Stop
from simpletuner.distributed.world import EXCHANGE_SECONDS, LAUNCHERS, Value, World, number_in
from simpletuner.errors import Problems, SimpleTunerError, UserError, shorten

# Processes wait while others save, encode or render, which may take hours; `Watch` detects a
# process that exits.
PATIENCE = timedelta(days=30)
START_SECONDS = 600.0  # within which all processes must join
SLACK_SECONDS = 3.0  # after which a call with a limit of its own has ended
# torchrun hosts the store, and reuses it when it restarts the processes.
KEPT_BY_LAUNCHER = "TORCHELASTIC_USE_AGENT_STORE"
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
FIRST = "process 0"  # store key: host, address and port of process 0, and the run's key
LOOPBACK = "127.0.0.1"
FIRST_PORT = 20000
PORTS = 20000
SMALL = 4096  # bytes of a value in the first message of a gather, which has a fixed size


class NotJoinedError(UserError):
    """This process cannot reach process 0, which therefore cannot report the reason."""


@dataclass(frozen=True)
class ConnectedWorld(World):
    """Processes connected through torch.distributed; see `connect`.

    Attributes:
        control: the CPU process group that gathers values.
        watch: monitors the other processes.
    """

    control: Any = field(kw_only=True)
    watch: Watch = field(kw_only=True)

    def gather(self, value: Value) -> list[Value]:
        self.watch.mark()
        content = pickle.dumps(value)
        # Most values are small, and a single message of fixed size takes a third of the time of
        # torch's two. It has the length in 8 bytes, then the beginning of the content.
        length = len(content).to_bytes(8, "big")
        messages = self._exchange(length + content[:SMALL], 8 + SMALL)
        largest = max(int.from_bytes(message[:8], "big") for message in messages)
        if largest <= SMALL:
            contents = [message[8:] for message in messages]
        else:
            contents = self._exchange(content, largest)
        # Pickle ignores the padding after a value.
        return [pickle.loads(pickled) for pickled in contents]

    def _exchange(self, content: bytes, size: int) -> list[bytes]:
        """Gather the content of every process, padded to `size` bytes."""
        import torch.distributed

        # A bytearray, since torch warns about read-only buffers.
        sent = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        torch.distributed.all_gather(received, sent, group=self.control)
        return [buffer.numpy().tobytes() for buffer in received]

    def first_failure(self, error: BaseException) -> str | None:
        from torch.distributed import DistError

        # A process that loses a peer, or is ended by the launcher for it, gets from the watch the
        # process that failed first. On a busy machine the watch may be late; only Ctrl-C must not
        # wait for it.
        patience = 0.0
        if isinstance(error, DistError) or "gloo" in str(error):  # gloo raises a plain RuntimeError
            patience = GRACE_SECONDS
        elif isinstance(error, KeyboardInterrupt):
            patience = 4 * POLL_SECONDS
        verdict = self.watch.wait_for_verdict(patience)
        if verdict is None:
            return None
        message, _ = verdict
        return message

    def counters(self) -> Callable[[str, int], int]:
        number = self._store("counters").add(f"of process {self.rank}", 1)
        numbers = self._store(f"counters/{number}")

        def add(name: str, count: int) -> int:
            self.watch.mark()
            return int(numbers.add(name, count))

        return add

    def _store(self, prefix: str) -> Any:
        """A namespace of the rendezvous store."""
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        return PrefixStore(prefix, _get_default_store())

    def exchanging(self, what: str) -> AbstractContextManager[None]:
        return self.watch.exchanging(what)

    def follow(self, stop: Stop, ended: Callable[[str, int], None]) -> Callable[[object], None]:
        self.watch.stop = stop
        if self.is_main:
            self.watch.reporter = RunReporter(ended)
        return self._on_progress

    def _on_progress(self, sign: object) -> None:
        self.watch.mark()

    def uninterrupted(self) -> AbstractContextManager[object]:
        return self.watch.writing


@dataclass
class RunReporter(EndReporter):
    """Lets the run of process 0 report its end.

    Attributes:
        end_run: called with a message and an exit code.
    """

    end_run: Callable[[str, int], None]

    def on_ended(self, message: str, code: int) -> None:
        self.end_run(message, code)


@contextmanager
def connect(
    place: World,
    rendezvous: str = "env://",
    *,
    limit: float = EXCHANGE_SECONDS,
    start_limit: float = START_SECONDS,
    reporter: EndReporter = EndReporter(),
) -> Iterator[ConnectedWorld]:
    """Connect this process to the others within a context.

    Tensors use NCCL on GPUs and gloo on CPUs.

    Args:
        place: rank and size of this process.
        rendezvous: equal in all processes: `env://` for variables set by a launcher, or
            `file:///path` of a file that does not exist yet.
        limit: seconds that a process may wait for another one that makes no progress.
        start_limit: seconds within which all processes must join.
        reporter: reports that the watch ends this process.

    Raises:
        UserError: processes have not joined.
        NotJoinedError: this process cannot reach process 0.
        SimpleTunerError: another process has failed.
    """
    # Imported here so that commands which never train stay free of torch.
    from torch import distributed

    deadline = time.monotonic() + start_limit
    store = open_store(place, rendezvous, deadline)
    watch = join_watch(place, store, limit, deadline)
    watch.reporter = reporter
    watch.enforce()
    try:
        control = _connect_groups(place, store, watch)
        yield ConnectedWorld(*astuple(place), control=control, watch=watch)
        distributed.barrier(control)
        distributed.destroy_process_group()
    finally:
        watch.close()


def _connect_groups(place: World, store: Any, watch: Watch) -> Any:
    """Create the process group for tensors; returns the group for values.

    Raises:
        SimpleTunerError: this process or another one has failed.
    """
    from torch import distributed

    try:
        backend = take_device(place)
        distributed.init_process_group(
            backend,
            # Twice the watch's limit, so that the watch reports first: it names the missing
            # process, torch does not.
            timeout=timedelta(seconds=2 * watch.limit),
            world_size=place.size,
            rank=place.rank,
            store=store,
        )
        return distributed.new_group(backend="gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:  # of a GPU or the network
        reason = str(error).partition("\n")[0]
        watch.wait_for_verdict(4 * POLL_SECONDS)  # the cause may be another process
        failure = f"Process {watch.own} cannot join the others: {reason}"
        message, _ = watch.fail(failure, 1, GRACE_SECONDS)
        raise SimpleTunerError(message) from error


def take_device(place: World) -> str:
    """Select the GPU of this process, if there are GPUs; returns the backend for tensors."""
    import torch

    if not torch.cuda.is_available():
        return "gloo"
    device = place.local_rank % torch.cuda.device_count()  # a launcher may expose only one
    torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(device)  # accelerate passes it to DDP as the device
    return "nccl"


def open_store(place: World, rendezvous: str, deadline: float) -> Any:
    """Open the rendezvous store, with a new namespace after every restart.

    Args:
        deadline: on the monotonic clock.

    Raises:
        UserError: the port is in use.
        NotJoinedError: the address cannot be reached, or a program there does not answer.
    """
    from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined] # public, not typed so

    if rendezvous.startswith("file://"):
        return FileStore(rendezvous.removeprefix("file://"), place.size)
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    here = socket.gethostname()
    settings: dict[str, Any] = {
        "is_master": place.is_main and os.environ.get(KEPT_BY_LAUNCHER) != "True",
        "wait_for_workers": False,
        "multi_tenant": True,
    }
    while True:
        # Short, so that Ctrl-C is handled in between.
        settings["timeout"] = timedelta(seconds=max(1.0, min(10.0, deadline - time.monotonic())))
        try:
            # torch would wait forever for a program that accepts the connection and never answers.
            store = _within(deadline, partial(TCPStore, address, port, **settings))
        except TimeoutError:
            raise NotJoinedError(
                f"MASTER_PORT: {address}:{port} is held by a program that does not answer process "
                f"{place.rank} on {here}. Choose another port."
            ) from None
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            if "EADDRINUSE" in reason:
                raise UserError(
                    f"MASTER_PORT: {address}:{port} on {here} is in use by another run or program. "
                    "Choose another port."
                ) from None
            if time.monotonic() >= deadline:
                raise NotJoinedError(
                    f"MASTER_ADDR: process {place.rank} on {here} cannot reach process 0 at "
                    f"{address}:{port}: {reason.rstrip('.')}. Is it running, is this its address, "
                    "and is the port open? start_timeout allows more time."
                ) from None
            time.sleep(POLL_SECONDS)
            continue
        store.set_timeout(timedelta(seconds=max(1.0, deadline - time.monotonic())))
        return PrefixStore(f"attempt {os.environ.get(ATTEMPT, '0')}", store)


def _within(deadline: float, call: Callable[[], Value]) -> Value:
    """The result of a call, made in a thread that is left behind if it takes too long.

    Args:
        deadline: on the monotonic clock. A call that ends by itself gets some seconds more.

    Raises:
        TimeoutError: it takes longer.
    """
    result = Future[Value]()

    def work() -> None:
        try:
            result.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised in the calling thread
            result.set_exception(error)

    threading.Thread(target=work, name="joining", daemon=True).start()
    return result.result(max(1.0, deadline - time.monotonic()) + SLACK_SECONDS)


def join_watch(place: World, store: Any, limit: float, deadline: float) -> Watch:
    """Start the watch of this process and connect it to the others.

    Raises:
        UserError: processes are missing, or there are too many.
        NotJoinedError: process 0 does not come, or cannot be reached.
    """
    if place.is_main:
        watch = _open_watch(place, store, limit)
    else:
        watch = _find_watch(place, store, limit, deadline)
    patience = deadline - time.monotonic()
    if not place.is_main:
        patience += GRACE_SECONDS  # process 0 reports which ones are missing
    missing = watch.begin(patience)
    if not missing:
        return watch
    if place.is_main:
        noun = "process" if len(missing) == 1 else "processes"
        names = f"{noun} {shorten([str(rank) for rank in missing], 8)}"
        message = (
            f"MASTER_ADDR: {names} of {place.size} did not join {watch.own.host} in time. Start "
            "the same command on every machine, with this one's address; start_timeout allows more "
            "time."
        )
        watch.fail(message, 2, GRACE_SECONDS)
    watch.close()
    if watch.verdict is None:
        raise NotJoinedError(f"MASTER_ADDR: process 0 does not respond to process {watch.own}.")
    message, _ = watch.verdict
    raise UserError(message)


def _open_watch(place: World, store: Any, limit: float) -> Watch:
    """The watch of process 0, which listens for the others; its address is in the store.

    Raises:
        UserError: there is another process 0.
    """
    watch = Watch(0, place.size, secrets.token_hex(8), limit)
    if store.add("first", 1) > 1:
        host = json.loads(store.get(FIRST))[0]
        raise UserError(
            f"RANK: process 0 already runs on {host}, so process {watch.own} is one too many."
        )
    address = LOOPBACK if place.is_on_one_machine else ""
    port = watch.links.listen(address, place.size)
    store.set(FIRST, json.dumps([watch.own.host, address, port, watch.own.key]))
    return watch


def _find_watch(place: World, store: Any, limit: float, deadline: float) -> Watch:
    """The watch of another process, connected to that of process 0.

    Raises:
        NotJoinedError: process 0 does not come, or cannot be reached.
    """
    while not store.check([FIRST]):  # polled in Python, where Ctrl-C is handled
        if time.monotonic() > deadline:
            raise NotJoinedError(
                f"MASTER_ADDR: process 0 did not start while process {place.rank} on "
                f"{socket.gethostname()} waited; start_timeout allows more time."
            )
        time.sleep(POLL_SECONDS / 10)
    host, address, port, key = json.loads(store.get(FIRST))
    watch = Watch(place.rank, place.size, key, limit)
    connection = _reach(host, address, port, deadline)
    watch.links.add(Link(connection, Beat(0, place.size, host, key)), 0)
    return watch


def _reach(host: str, address: str, port: int, deadline: float) -> socket.socket:
    """Connect to the watch of process 0, at `address` or else at MASTER_ADDR or its host name.

    Raises:
        NotJoinedError: the watch cannot be reached.
    """
    targets = [address]
    if not address:
        targets = [os.environ.get("MASTER_ADDR") or host, host]
    while True:
        for target in dict.fromkeys(targets):  # without duplicates
            try:
                return socket.create_connection((target, port), timeout=10)
            except OSError as error:
                reason = error
        if time.monotonic() > deadline:
            raise NotJoinedError(
                f"MASTER_ADDR: port {port} of {host}, where process 0 listens, cannot be reached "
                f"from {socket.gethostname()}: {reason}"
            )
        time.sleep(1)


def set_rendezvous(place: World, environment: MutableMapping[str, str], report: Problems) -> None:
    """Set the variables that `env://` reads, and report those that only the user can set."""
    for name, number in zip(LAUNCHERS[0], astuple(place), strict=True):
        environment[name] = str(number)
    titles = {
        "MASTER_ADDR": "the address of the machine of process 0",
        "MASTER_PORT": "a free port there",
    }
    for name, default in _usual_rendezvous(place, environment).items():
        value = environment.get(name) or default
        if value:
            environment[name] = value
        else:
            report.error(
                name,
                f"is not set. {place.size} processes on several machines need {titles[name]}.",
            )
    port = environment.get("MASTER_PORT")
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        report.error("MASTER_PORT", f"is {port!r}, not a port: 1 to 65535.")


def _usual_rendezvous(place: World, environment: Mapping[str, str]) -> dict[str, str]:
    """Default rendezvous address and port; empty if unknown."""
    address = first_host(environment.get("SLURM_STEP_NODELIST", ""))
    if not address and place.is_on_one_machine:
        address = LOOPBACK
    port = ""
    job = number_in(environment, "SLURM_JOB_ID") or 0
    if job or place.is_on_one_machine:
        port = str(FIRST_PORT + job % PORTS)
    return {"MASTER_ADDR": address, "MASTER_PORT": port}


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list such as `gpu[03-07,9],login`."""
    # A name up to a bracket or comma, the first number in the brackets, and the rest of the name.
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    if match is None:
        return ""
    return "".join(part or "" for part in match.groups())
