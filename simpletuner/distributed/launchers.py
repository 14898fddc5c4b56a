"""What launchers (torchrun, accelerate, srun, mpirun) put into the environment of the processes that they start."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from simpletuner.distributed.world import World
from simpletuner.errors import Problem, UserError

LOOPBACK = "127.0.0.1"


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
