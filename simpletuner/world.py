"""The processes of a run and their communication: the only module that knows about several processes.

A run of one process is a `World` of size 1, which communicates with nobody and costs nothing. Several are started by a
launcher (torchrun, accelerate, srun, mpirun), which tells each of them its place in the environment.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

from simpletuner.errors import Problem, UserError

Value = TypeVar("Value")

# Processes wait for each other's saving, encoding and rendering, which may take hours; if one ends, `Watch` notices.
PATIENCE = timedelta(days=30)
# The longest that a step may take to exchange tensors, in seconds.
EXCHANGE_SECONDS = 1800.0
POLL_SECONDS = 0.5
ROOM = 4096  # bytes of a value that processes exchange at once
LOST = "A process has ended without a word: it was killed, or the system ran out of memory."
FAILURE, STOP, DOING = "failure", "stop", "doing"


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


@dataclass
class Watch:
    """Notices what concerns all processes, also while this one waits for another: `poll` has a thread of its own.

    Attributes:
        ended: called with a message and an exit code before this process is ended because another one failed.
        stop_requested: whether this process was asked to stop; the others are then asked as well.
        request_stop: asks this process to stop.
        limit: seconds that an exchange of tensors may take.
    """

    rank: int
    size: int
    store: Any
    limit: float = EXCHANGE_SECONDS
    ended: Callable[[str, int], None] = lambda message, code: None
    stop_requested: Callable[[], bool] = lambda: False
    request_stop: Callable[[], None] = lambda: None
    writing: threading.Lock = field(default_factory=threading.Lock)
    _doing: tuple[str, float] | None = field(default=None, init=False)
    _over: threading.Event = field(default_factory=threading.Event, init=False)

    def close(self) -> None:
        self._over.set()

    def fail(self, message: str, code: int) -> tuple[str, int]:
        """Announce that this process fails; returns the message and the code of the one that failed first."""
        own = json.dumps([message, code])
        first, code = json.loads(self.store.compare_set(FAILURE, "", own).decode())
        return str(first), int(code)

    def failure(self) -> str | None:
        """Why the first process failed that did."""
        return str(json.loads(self.store.get(FAILURE))[0]) if self.store.check([FAILURE]) else None

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        self._doing = what, time.monotonic()
        yield
        self._doing = None

    def poll(self) -> None:
        from torch.distributed import DistError

        try:
            while not self._over.wait(POLL_SECONDS):
                self._look()
        except (DistError, RuntimeError):  # the store is gone, and with it the process that held it
            self._end(LOST, 1)

    def _look(self) -> None:
        if self.store.check([FAILURE]):
            self._end(*json.loads(self.store.get(FAILURE).decode()))
        if self.stop_requested():
            self.store.set(STOP, "")
        elif self.store.check([STOP]):
            self.request_stop()
        doing = self._doing
        self.store.set(f"{DOING}{self.rank}", doing[0] if doing else "")
        if doing is not None and time.monotonic() - doing[1] > self.limit:
            self._end(*self.fail(f"{doing[0]} has waited {self.limit:g} s for {self._absent()}.", 1))

    def _absent(self) -> str:
        """The processes that do not take part in this one's exchange."""
        keys = [f"{DOING}{rank}" for rank in range(self.size)]
        busy = [str(rank) for rank, key in enumerate(keys) if not (self.store.check([key]) and self.store.get(key))]
        return f"process {', '.join(busy)}" if busy else "an exchange of tensors between the processes"

    def _end(self, message: str, code: int) -> None:
        """End this process, whose main thread may be waiting in a library for a process that is gone."""
        with self.writing:
            if not self._over.is_set():
                self.ended(message, code)
                os._exit(code)


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
        return self.watch.failure() or (LOST if lost else None)

    def counters(self) -> Callable[[str, int], int]:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        store = PrefixStore("counters", _get_default_store())
        number = store.add(f"of process {self.rank}", 1)
        return PrefixStore(str(number), store).add

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
    place: World, meeting_point: str = "env://", *, limit: float = EXCHANGE_SECONDS
) -> Iterator[ConnectedWorld]:
    """A world of several processes while the block lasts. Tensors are exchanged by NCCL on GPUs and by gloo on CPUs.

    Args:
        place: rank and size of this process.
        meeting_point: the same on all of them: `env://` for what a launcher has set, or `file:///path` of a file that
            does not exist yet.
        limit: seconds that an exchange of tensors may take.
    """
    # Imported here so that the commands which never train stay free of torch.
    import torch
    from torch import distributed
    from torch.distributed.distributed_c10d import _get_default_store

    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(place.local_rank)
    distributed.init_process_group(
        "nccl" if on_gpu else "gloo", meeting_point, timedelta(seconds=2 * limit), place.size, place.rank
    )
    control = distributed.new_group(backend="gloo", timeout=PATIENCE)
    store: Any = _get_default_store()
    watch = Watch(place.rank, place.size, store.clone(), limit)  # a connection of its own: the other may be waiting
    polling = threading.Thread(target=watch.poll, name="watch", daemon=True)
    polling.start()
    try:
        yield ConnectedWorld(*astuple(place), control=control, watch=watch)
        distributed.barrier(control)
    finally:
        watch.close()
    polling.join()
    distributed.barrier(control)  # the store lives in one of them, and the watch of none looks into it any more
    distributed.destroy_process_group()


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
    here = place.local_size == place.size
    job = _number(environment, "SLURM_JOB_ID") or 0
    first = first_host(environment.get("SLURM_STEP_NODELIST", "")) or ("127.0.0.1" if here else "")
    found = {"MASTER_ADDR": first, "MASTER_PORT": str(FIRST_PORT + job % PORTS) if here or job else ""}
    values = {name: environment.get(name) or value for name, value in found.items()}
    environment.update({name: value for name, value in values.items() if value})
    own = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    places = (place.rank, place.size, place.local_rank, place.local_size)
    environment.update({name: str(value) for name, value in zip(own, places, strict=True)})
    what = {"MASTER_ADDR": "the address of the machine of process 0", "MASTER_PORT": "a free port there"}
    return [
        Problem(name, f"is not set. {place.size} processes on several machines need {what[name]}.")
        for name, value in values.items()
        if not value
    ]


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts, such as `gpu[03-07,9],login`."""
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found else ""
