"""Checks that all processes of a run make the same plan, and reports the differences."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from simpletuner.budget.budget import Budget
from simpletuner.distributed.world import World
from simpletuner.errors import ConfigError, Problem, shorten
from simpletuner.hashing import hash_file, hash_json
from simpletuner.planning.plans import Plan
from simpletuner.planning.resume import identify


def plan_in_every_process(world: World, make: Callable[[int | None], Budget]) -> Budget:
    """The plan of all processes with its estimate, which every process makes itself.

    The main process comes first and draws the seed; then a process on each further machine, which
    may download; then the rest.

    Args:
        make: makes the plan with a seed; None draws one.

    Raises:
        ConfigError: this process cannot make the plan, or plans differ from that of rank 0.
    """
    first = world.main_only(lambda: make(None))
    seed = world.broadcast(first.plan.seed if first else None)
    # Processes of one machine share its download cache: the leader fills it, the rest only read.
    budget = world.leader_first(lambda: first or make(seed))
    values = world.gather((socket.gethostname(), agreed_values(budget.plan)))
    problems = differences(values)
    if problems:
        raise ConfigError(problems)
    return budget


def agreed_values(plan: Plan) -> dict[str, str]:
    """Values that must be equal in all processes, by the name that error messages use."""
    config = plan.config
    identity = identify(plan)
    start = "the beginning" if plan.resume is None else plan.resume.path.name
    settings = {**identity.settings, **identity.order, **config.flat}
    values = {key: repr(value) for key, value in settings.items()}
    for name, version in identity.versions.items():
        values[f"version of {name}"] = version
    for role, digest in identity.weights.items():
        values[f"content of {role}"] = digest[:12]
    values["data_backend_config"] = f"a list of samples with the digest {identity.datasets[:12]}"
    values["content of simpletuner"] = source_digest()
    values["seed"] = str(plan.seed)
    values["resume_from_checkpoint"] = f"{config.run.resume_from_checkpoint!r}, which is {start}"
    return values


def source_digest() -> str:
    """A hash of this package's source: two checkouts of one version may differ."""
    folder = Path(__file__).parents[2]
    files = {path.relative_to(folder).as_posix(): hash_file(path) for path in folder.rglob("*.py")}
    return hash_json(files)[:12]


def differences(processes: Sequence[tuple[str, Mapping[str, str]]]) -> list[Problem]:
    """The values that differ from those of process 0.

    Args:
        processes: host name and values of every process, by rank.
    """
    _, first = processes[0]
    # Processes with the same difference share a line of the error.
    places: dict[tuple[str, str, str], list[str]] = {}
    for rank, (host, values) in enumerate(processes):
        for key in first.keys() | values.keys():
            expected = first.get(key, "absent")
            actual = values.get(key, "absent")
            if actual != expected:
                places.setdefault((key, expected, actual), []).append(f"{rank} on {host}")
    problems = []
    for (key, expected, actual), names in sorted(places.items()):
        message = (
            f"is {expected} in the first process, but {actual} in process {shorten(names, 4)}."
        )
        problems.append(Problem(key, message))
    return problems
