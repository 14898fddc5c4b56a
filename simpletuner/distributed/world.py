"""The processes of a run and their communication: the only module that knows about several processes.

A run of one process is a `World` of size 1, which communicates with nobody and costs nothing. Several are started by a
launcher (torchrun, accelerate, srun, mpirun), which tells each of them its place in the environment.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

from simpletuner.distributed.watch import EXCHANGE_SECONDS, GRACE_SECONDS, POLL_SECONDS, Beat, Link, Watch
from simpletuner.errors import Problem, SimpleTunerError, UserError, shorten

Value = TypeVar("Value")

# Processes wait for each other's saving, encoding and rendering, which may take hours; if one ends, `Watch` notices.
PATIENCE = timedelta(days=30)
START_SECONDS = 600.0  # in which all processes must have come
ROOM = 4096  # size of the first, fixed-size message of a gather
# torchrun keeps the store, and the same one when it starts all processes again.
KEPT_BY_LAUNCHER, ATTEMPT = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"
FIRST = "process 0"  # key of its host, its address and port, and the run's key
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """The processes of a run, which do the same steps at the same time.

    Attributes:
        rank: of this process, counted from 0.
        size: how many processes there are.
        local_rank, local_size: the same among the processes of this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once: files, the record, the terminal."""
        return self.rank == 0

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all processes run on this machine."""
        return self.local_size == self.size

    @property
    def is_leader(self) -> bool:
        """Whether this process does what is done once on each machine."""
        return self.local_rank == 0

    def slots(self, count: int) -> range:
        """Positions of this process's `count` samples in the global batch."""
        return range(self.rank * count, (self.rank + 1) * count)

    def share(self, items: Sequence[Value]) -> Sequence[Value]:
        """This process's part of work that is dealt out one by one."""
        return items[self.rank :: self.size]

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, ordered by rank, on every process; waits for all of them."""
        if self.size > 1:
            raise RuntimeError("these processes are not connected; see `connect`")
        return [value]

    def first(self, name: str, value: str) -> str:
        """The first value that any process gave for a name, without waiting for anybody."""
        return self.gather(value)[0]

    def counters(self) -> Callable[[str, int], int]:
        """What adds to named numbers of all processes and returns their sums, without waiting for anybody.

        All processes make theirs in the same order, each time with new numbers.
        """
        raise RuntimeError("only connected processes count together; see `connect`")

    def leader_first(self, work: Callable[[], Value]) -> Value:
        """Do work that leaves files behind, such as downloads: in one process of each machine, then in the others."""
        if not self.is_leader:
            self.barrier()
        value = work()
        if self.is_leader:
            self.barrier()
        return value

    def in_turn(self, work: Callable[[], Value]) -> Value:
        """Do work that takes host memory in one process of each machine after the other."""
        value: Value | None = None
        for turn in range(max(self.gather(self.local_size))):
            if turn == self.local_rank:
                value = work()
            self.barrier()
        return cast(Value, value)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return any(self.gather(flag))

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean of each number over the processes, bit-identical on all of them."""
        return [sum(column) / self.size for column in zip(*self.gather(list(values)), strict=True)]

    def broadcast(self, value: Value) -> Value:
        """The main process's value, on every process. For decisions, not for tensors."""
        return self.gather(value)[0]

    def on_main(self, act: Callable[[], Value]) -> Value:
        """What `act` returns in the main process, the only one that calls it. For what is small enough to be sent."""
        return self.broadcast(cast(Value, act() if self.is_main else None))

    def barrier(self) -> None:
        """Wait until every process has reached this point."""
        self.gather(None)

    def first_failure(self, error: BaseException) -> str | None:
        """Why another process failed, which then caused this error in this one; None if none has."""
        return None

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """A context in which tensors are exchanged, and a process that does not take part ends the run."""
        yield

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """A context that the failure of another process does not cut short, for writing."""
        yield


@dataclass(frozen=True)
class ConnectedWorld(World):
    """Processes connected through torch.distributed; see `connect`.

    Attributes:
        control: the group, on the CPU, in which values are gathered.
        watch: notices what happens to the others.
    """

    control: Any = field(kw_only=True)
    watch: Watch = field(kw_only=True)

    def gather(self, value: Value) -> list[Value]:
        self.watch.mark()
        content = pickle.dumps(value)
        # Nearly all values are small, and one exchange of a fixed size takes a third of the time of torch's two.
        heads = self._exchange(len(content).to_bytes(8, "big") + content[:ROOM], 8 + ROOM)
        sizes = [int.from_bytes(head[:8], "big") for head in heads]
        found = [head[8:] for head in heads] if max(sizes) <= ROOM else self._exchange(content, max(sizes))
        return [pickle.loads(each) for each in found]

    def _exchange(self, content: bytes, size: int) -> list[bytes]:
        """The content of each process, filled up to `size` bytes."""
        import torch
        from torch.distributed import all_gather

        own = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.size)]
        all_gather(found, own, group=self.control)
        return [each.numpy().tobytes() for each in found]

    def first_failure(self, error: BaseException) -> str | None:
        from torch.distributed import DistError

        lost = isinstance(error, DistError) or "gloo" in str(error)  # which raises a plain RuntimeError
        # Whoever loses a process, and whom a launcher ends for it, hears at the next looks which one it was.
        verdict = self.watch.known(4 * POLL_SECONDS if lost or isinstance(error, KeyboardInterrupt) else 0.0)
        return verdict and verdict[0]

    def first(self, name: str, value: str) -> str:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        self.watch.mark()
        return PrefixStore("first", _get_default_store()).compare_set(name, "", value).decode()

    def counters(self) -> Callable[[str, int], int]:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        store = PrefixStore("counters", _get_default_store())
        number = store.add(f"of process {self.rank}", 1)
        numbers = PrefixStore(str(number), store)

        def add(name: str, count: int) -> int:
            self.watch.mark()
            return int(numbers.add(name, count))

        return add

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        with self.watch.exchanging(what):
            yield

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with self.watch.writing:
            yield


@contextmanager
def connect(
    place: World,
    meeting_point: str = "env://",
    *,
    limit: float = EXCHANGE_SECONDS,
    start_limit: float = START_SECONDS,
    prepare: Callable[[Watch], None] = lambda watch: None,
) -> Iterator[ConnectedWorld]:
    """A world of several processes while the block lasts. Tensors are exchanged by NCCL on GPUs and by gloo on CPUs.

    Args:
        place: rank and size of this process.
        meeting_point: the same on all of them: `env://` for what a launcher has set, or `file:///path` of a file that
            does not exist yet.
        limit: seconds that a process may wait for another one that does nothing.
        start_limit: seconds in which all must have come.
        prepare: called before the watch may end this process.

    Raises:
        UserError: they have not, or cannot reach each other.
        SimpleTunerError: one of them has failed meanwhile.
    """
    # Imported here so that the commands which never train stay free of torch.
    from torch import distributed

    deadline = time.monotonic() + start_limit
    store = open_store(place, meeting_point, deadline)
    watch = join_watch(place, store, limit, deadline)
    prepare(watch)
    watch.enforce()
    try:
        control = _connect_groups(place, store, watch)
        yield ConnectedWorld(*astuple(place), control=control, watch=watch)
        distributed.barrier(control)
        distributed.destroy_process_group()
    finally:
        watch.close()


def _connect_groups(place: World, store: Any, watch: Watch) -> Any:
    """Connect the processes for tensors; returns the group for values.

    Raises:
        SimpleTunerError: this process or another one has failed.
    """
    from torch import distributed

    try:
        backend, patience = take_device(place), timedelta(seconds=2 * watch.limit)
        distributed.init_process_group(backend, None, patience, place.size, place.rank, store)
        return distributed.new_group(backend="gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:  # from a GPU or the network
        reason = str(error).partition("\n")[0]
        known = watch.known(4 * POLL_SECONDS)  # the cause may be another process
        message, _ = known or watch.fail(f"Process {watch.own} cannot join the others: {reason}", 1)
        watch.linger(GRACE_SECONDS)
        raise SimpleTunerError(message) from error


def take_device(place: World) -> str:
    """Make the GPU of this process the current one, if there are GPUs; returns what tensors are exchanged by."""
    import torch

    if not torch.cuda.is_available():
        return "gloo"
    device = place.local_rank % torch.cuda.device_count()  # a launcher may show each process only its own
    torch.cuda.set_device(device)
    os.environ["LOCAL_RANK"] = str(device)  # by which accelerate names the device to DDP
    return "nccl"


def open_store(place: World, meeting_point: str, deadline: float) -> Any:
    """The store in which processes find each other, new at every restart.

    Args:
        deadline: on the monotonic clock.

    Raises:
        UserError: its address cannot be reached, or its port is taken.
    """
    from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined] # public, not typed so

    if meeting_point.startswith("file://"):
        return FileStore(meeting_point.removeprefix("file://"), place.size)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = place.is_main and os.environ.get(KEPT_BY_LAUNCHER) != "True"
    while True:
        left = timedelta(seconds=max(1.0, min(10.0, deadline - time.monotonic())))  # so that Ctrl-C is heard between
        try:
            store = TCPStore(address, port, is_master=holds, timeout=left, wait_for_workers=False, multi_tenant=True)
        except (RuntimeError, ValueError) as error:
            refuse_meeting(error, place, f"{address}:{port}", is_over=time.monotonic() >= deadline)
            time.sleep(POLL_SECONDS)
            continue
        store.set_timeout(timedelta(seconds=max(1.0, deadline - time.monotonic())))
        return PrefixStore(f"attempt {os.environ.get(ATTEMPT, '0')}", store)


def refuse_meeting(error: Exception, place: World, where: str, *, is_over: bool) -> None:
    """Raise unless another attempt to reach the store may succeed.

    Raises:
        UserError: the port is taken, or the time is over.
    """
    host, text = socket.gethostname(), str(error).partition("\n")[0]
    if "EADDRINUSE" in text:
        raise UserError(f"MASTER_PORT: {where} on {host} is in use by another run or program. Choose another port.")
    if is_over:
        raise UserError(
            f"MASTER_ADDR: process {place.rank} on {host} cannot reach process 0 at {where}: {text.rstrip('.')}. Is it "
            "running, is this its address, and is the port open? start_timeout allows more time."
        )


def join_watch(place: World, store: Any, limit: float, deadline: float) -> Watch:
    """The running watch of this process, connected with the others.

    Raises:
        UserError: not all processes have come, or too many.
    """
    if place.is_main:
        watch = Watch(0, place.size, secrets.token_hex(8), limit)
        if store.add("first", 1) > 1:
            other = json.loads(store.get(FIRST))[0]
            raise UserError(f"RANK: process 0 runs already on {other}, so process {watch.own} is one too many.")
        address = LOOPBACK if place.is_on_one_machine else ""
        store.set(FIRST, json.dumps([watch.own.host, address, watch.links.listen(address), watch.links.key]))
    else:
        while not store.check([FIRST]):  # in Python, where Ctrl-C is heard
            if time.monotonic() > deadline:
                raise UserError("MASTER_ADDR: process 0 did not come in time; start_timeout allows more.")
            time.sleep(POLL_SECONDS / 10)
        host, address, port, key = json.loads(store.get(FIRST))
        watch = Watch(place.rank, place.size, key, limit)
        watch.links.add(Link(_reach(host, address, port, deadline), Beat(0, place.size, host, key)), 0)
    # Process 0 is the one that says who is missing.
    missing = watch.begin(deadline - time.monotonic() + (0.0 if place.is_main else GRACE_SECONDS))
    if missing and place.is_main:
        names = f"{'process' if len(missing) == 1 else 'processes'} {shorten([str(each) for each in missing], 8)}"
        watch.fail(
            f"MASTER_ADDR: {names} of {place.size} did not come to {watch.own.host} in time. Start the same command "
            "on every machine, with this one's address; start_timeout allows more time.", 2,
        )  # fmt: skip
        watch.linger(GRACE_SECONDS)
    if missing:
        watch.close()
        raise UserError(watch.verdict[0] if watch.verdict else "MASTER_ADDR: process 0 does not answer.")
    return watch


def _reach(host: str, address: str, port: int, deadline: float) -> socket.socket:
    """A connection to the watch of process 0: at its only address, else at the one that the user gave, or by its name.

    Raises:
        UserError: there is none.
    """
    while True:
        for each in [address] if address else dict.fromkeys((os.environ.get("MASTER_ADDR") or host, host)):
            try:
                return socket.create_connection((each, port), timeout=10)
            except OSError as error:
                reason = error
        if time.monotonic() > deadline:
            raise UserError(f"MASTER_ADDR: port {port} of {host}, where process 0 waits, cannot be reached: {reason}")
        time.sleep(1)


@dataclass(frozen=True)
class Launcher:
    """The environment variables with which a launcher tells a process its place."""

    rank: str
    size: str
    local_rank: str
    local_size: str


LAUNCHERS = (
    Launcher("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun, accelerate
    # Only srun sets the size of a step. In a batch script, which is no step, SLURM_PROCID is set too.
    Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
FIRST_PORT, PORTS = 20000, 20000


def launched(environment: Mapping[str, str]) -> World | None:
    """The place of this process among those that a launcher started; None if it was started by itself.

    Raises:
        UserError: a variable is missing or is no number.
    """
    for launcher in LAUNCHERS:
        if environment.get(launcher.size, "").strip() not in ("", "0", "1"):
            rank, size = _number(environment, launcher.rank), _number(environment, launcher.size)
            if rank is None or size is None or rank >= size:
                given = environment.get(launcher.rank, "not set")
                raise UserError(
                    f"{launcher.size} is {environment[launcher.size]}, as if a launcher had started several processes, "
                    f"but {launcher.rank} is {given}. Let one launcher set both, or unset {launcher.size}."
                )
            # Kubernetes sets neither: it starts one process in each machine.
            local = _number(environment, launcher.local_rank) or 0, _number(environment, launcher.local_size) or 1
            return World(rank, size, *local)
    return None


def _number(environment: Mapping[str, str], name: str) -> int | None:
    """A variable as a number; Slurm lists the tasks of all machines, such as 4(x2)."""
    found = re.match(r"\d+", environment.get(name, "").strip())
    return int(found[0]) if found else None


def settle_meeting(place: World, environment: MutableMapping[str, str]) -> list[Problem]:
    """Set what torch and accelerate need to know for `env://`; returns what only the user knows."""
    here = place.is_on_one_machine
    job = _number(environment, "SLURM_JOB_ID") or 0
    first = first_host(environment.get("SLURM_STEP_NODELIST", "")) or (LOOPBACK if here else "")
    found = {"MASTER_ADDR": first, "MASTER_PORT": str(FIRST_PORT + job % PORTS) if here or job else ""}
    values = {name: environment.get(name) or value for name, value in found.items()}
    environment.update({name: value for name, value in values.items() if value})
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    places = (place.rank, place.size, place.local_rank, place.local_size)
    environment.update({name: str(value) for name, value in zip(own, places, strict=True)})
    what = {"MASTER_ADDR": "the address of the machine of process 0", "MASTER_PORT": "a free port there"}
    port = values["MASTER_PORT"]
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        return [Problem("MASTER_PORT", f"is {port!r}, not a port: 1 to 65535.")]
    return [
        Problem(name, f"is not set. {place.size} processes on several machines need {what[name]}.")
        for name, value in values.items()
        if not value
    ]


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts, such as `gpu[03-07,9],login`."""
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""
