"""The processes of a run: the rank of this process, and the exchange of values.

A run with one process is a `World` of size 1, which does not communicate and costs nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar, cast

from simpletuner.distributed.requests import Stop
from simpletuner.errors import UserError

Value = TypeVar("Value")

EXCHANGE_SECONDS = 1800.0  # maximum time a process may wait for another without progress


@dataclass(frozen=True)
class World:
    """The processes of a run, which take the same steps in parallel.

    Attributes:
        rank: rank of this process, counted from 0.
        size: number of processes.
        local_rank, local_size: rank and number among the processes of this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the run's files and its terminal output."""
        return self.rank == 0

    @property
    def place(self) -> tuple[int, int]:
        """(rank, size)."""
        return self.rank, self.size

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all processes run on this machine."""
        return self.local_size == self.size

    @property
    def is_leader(self) -> bool:
        """Whether this process does the work needed once per machine."""
        return self.local_rank == 0

    @property
    def label(self) -> str:
        """Prefix of this process's log lines; empty for a single process."""
        return f"[{self.rank}] " if self.size > 1 else ""

    def slots(self, count: int) -> range:
        """Positions of this process's `count` samples in the global batch."""
        return range(self.rank * count, (self.rank + 1) * count)

    def data_parallel(self, processes_per_sample: int) -> World:
        """The world in which every member trains on other samples.

        Consecutive processes that share the tokens of the same samples are one member. Of 8
        processes, of which 2 train on each sample, the `size` is 4 and the `rank` of processes 6
        and 7 is 3. `slots` are the positions of this member's samples, and `gather` returns one
        value per member. By default, every process is a member.
        """
        if processes_per_sample == 1:
            return self
        rank = self.rank // processes_per_sample
        size = self.size // processes_per_sample
        return DataParallelWorld(
            rank, size, processes=self, processes_per_sample=processes_per_sample
        )

    def share(self, items: Sequence[Value]) -> Sequence[Value]:
        """This process's items of a list, assigned round-robin."""
        return items[self.rank :: self.size]

    def gather(self, value: Value) -> list[Value]:
        """All-gather: the values of all processes, ordered by rank. Collective."""
        if self.size > 1:
            raise RuntimeError("these processes are not connected; see `connect`")
        return [value]

    def counters(self) -> Callable[[str, int], int]:
        """A function `(name, count) -> sum` that adds to a counter shared by all processes.

        The sum is read without waiting for the others. Every call creates new counters, so all
        processes must make these calls in the same order.
        """
        raise RuntimeError("only connected processes share counters; see `connect`")

    def leader_first(self, work: Callable[[], Value]) -> Value:
        """Run work that writes files, such as downloads, in one process per machine first."""
        if not self.is_leader:
            self.barrier()
        value = work()
        if self.is_leader:
            self.barrier()
        return value

    def in_turn(self, work: Callable[[], Value]) -> Value:
        """Run work that needs much host memory in one process at a time per machine."""
        value: Value | None = None
        # Every barrier needs all processes, so all take as many turns as the largest machine.
        turns = max(self.gather(self.local_size))
        for turn in range(turns):
            if turn == self.local_rank:
                value = work()
            self.barrier()
        return cast(Value, value)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return any(self.gather(flag))

    def mean(self, values: Sequence[float]) -> list[float]:
        """The elementwise mean over the processes, bit-identical in all of them. Collective."""
        gathered = self.gather(list(values))
        return [sum(column) / self.size for column in zip(*gathered, strict=True)]

    def broadcast(self, value: Value) -> Value:
        """The main process's value, in every process; for decisions, not tensors. Collective."""
        return self.gather(value)[0]

    def main_only(self, act: Callable[[], Value]) -> Value | None:
        """Call `act` in the main process only; all other processes return None immediately."""
        return act() if self.is_main else None

    def on_leader(self, act: Callable[[], Value]) -> Value:
        """Call `act` in one process per machine; all of the machine return its result. Collective.

        Ranks of a machine are consecutive, so its leader is `local_rank` ranks before this process.
        """
        results = self.gather(act() if self.is_leader else None)
        leader = self.rank - self.local_rank
        return cast(Value, results[leader])

    def on_main(self, act: Callable[[], Value]) -> Value:
        """Call `act` in the main process; all return its (small) result. Collective."""
        return self.broadcast(cast(Value, self.main_only(act)))

    def unique_name(self, name: str) -> str:
        """The name with the rank appended; unchanged in the main process."""
        return name if self.is_main else f"{name}-process-{self.rank}"

    def place_among_leaders(self) -> tuple[int, int] | None:
        """`place` among the leaders; None in all other processes. Collective."""
        leaders = [rank for rank, is_leader in enumerate(self.gather(self.is_leader)) if is_leader]
        return (leaders.index(self.rank), len(leaders)) if self.is_leader else None

    def barrier(self) -> None:
        """Wait until every process has reached this point."""
        self.gather(None)

    def first_failure(self, error: BaseException) -> str | None:
        """Why another process failed first and caused this error; None if none did."""
        return None

    def exchanging(self, what: str) -> AbstractContextManager[None]:
        """A context for exchanging tensors; the run ends if a process never enters it."""
        return nullcontext()

    def follow(self, stop: Stop, ended: Callable[[str, int], None]) -> Callable[[object], None]:
        """Share stop requests with all processes; returns a heartbeat function to call on progress.

        Args:
            ended: called in the main process with a message and an exit code if another process
                ends this one.
        """
        return lambda sign: None

    def uninterrupted(self) -> AbstractContextManager[object]:
        """A context for writing, which the failure of another process does not interrupt."""
        return nullcontext()


@dataclass(frozen=True)
class DataParallelWorld(World):
    """Groups of consecutive processes that share the tokens of a sample.

    Made by `World.data_parallel`.

    Attributes:
        processes: the processes of all groups.
        processes_per_sample: number of processes in a group.
    """

    processes: World = field(kw_only=True)
    processes_per_sample: int = field(kw_only=True)

    def gather(self, value: Value) -> list[Value]:
        # All processes of a group have the same value.
        return self.processes.gather(value)[:: self.processes_per_sample]


def usable_cores() -> int:
    """Cores that this process may use."""
    # `cpu_count` ignores the limits of Slurm and containers, but macOS has nothing else.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compute_threads(wanted: int | None = None) -> int:
    """Number of CPU compute threads: `wanted`, limited by the usable cores and OMP_NUM_THREADS.

    More threads than cores would wait for each other in every operation.
    """
    threads = usable_cores()
    if wanted:
        threads = min(threads, wanted)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal():
        threads = min(threads, int(limit))
    return max(1, threads)


# Variables with which launchers pass rank, size, local rank and local size.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun, accelerate
    # srun sets the size of a step. SLURM_PROCID alone is not enough: batch scripts, which are not a
    # step, have it too.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def world_from_launcher(environment: Mapping[str, str]) -> World | None:
    """The world of processes started by a launcher; None without a launcher.

    Raises:
        UserError: a variable is missing or not a number.
    """
    for names in LAUNCHERS:
        rank_name, size_name, *_ = names
        if environment.get(size_name, "").strip() in ("", "0", "1"):
            continue  # a launcher with a single process changes nothing
        rank, size, local_rank, local_size = (number_in(environment, name) for name in names)
        if rank is None or size is None or rank >= size:
            raise UserError(
                f"{size_name} is {environment[size_name]}, as if a launcher had started "
                f"several processes, but {rank_name} is "
                f"{environment.get(rank_name, 'not set')}. Let one launcher set both, or "
                f"unset {size_name}."
            )
        # Kubernetes sets no local variables: it starts one process per machine.
        return World(rank, size, local_rank or 0, local_size or 1)
    return None


def number_in(environment: Mapping[str, str], name: str) -> int | None:
    """The number at the start of a variable; None if it has none."""
    # Slurm lists the tasks of all machines, such as 4(x2).
    digits = re.match(r"\d+", environment.get(name, "").strip())
    return int(digits[0]) if digits else None
