"""The processes of a run and their communication: the only module that knows about several processes.

A run of one process is a `World` of size 1, which communicates with nobody and costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

Value = TypeVar("Value")

# Set by launchers (torchrun, accelerate, mpirun, srun with PMI) for the processes they start.
LAUNCHED_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class World:
    """The processes of a run, which do the same steps at the same time.

    Attributes:
        rank: of this process, counted from 0.
        size: how many processes there are.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once: files, the record, the terminal."""
        return self.rank == 0

    def slots(self, count: int) -> range:
        """Positions of this process's `count` samples in the global batch."""
        return range(self.rank * count, (self.rank + 1) * count)

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes, ordered by rank, on every process; waits for all of them."""
        if self.size > 1:
            raise RuntimeError("these processes are not connected; see `connect`")
        return [value]

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return any(self.gather(flag))

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean of each number over the processes, bit-identical on all of them."""
        return [sum(column) / self.size for column in zip(*self.gather(list(values)), strict=True)]

    def broadcast(self, value: Value) -> Value:
        """The main process's value, on every process. For decisions, not for tensors."""
        return self.gather(value)[0]

    def barrier(self) -> None:
        """Wait until every process has reached this point."""
        self.gather(None)


class ConnectedWorld(World):
    """Processes connected through torch.distributed (gloo, on the CPU); see `connect`."""

    def gather(self, value: Value) -> list[Value]:
        from torch.distributed import all_gather_object

        values: list[Value] = [value] * self.size
        all_gather_object(values, value)
        return values


@contextmanager
def connect(rank: int, size: int, meeting_point: str) -> Iterator[World]:
    """A world of several processes while the block lasts.

    Args:
        meeting_point: the same on all of them: `tcp://host:port`, or `file:///path` of a file that does not exist yet.
    """
    # Imported here so that the commands which never train stay free of torch.
    from torch.distributed import destroy_process_group, init_process_group

    init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=size)
    try:
        yield ConnectedWorld(rank, size)
    finally:
        destroy_process_group()


def launched_sizes(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with which a launcher announces more than one process, and their values."""
    given = {name: environment[name].strip() for name in LAUNCHED_SIZES if name in environment}
    return {name: value for name, value in given.items() if value not in ("", "0", "1")}
