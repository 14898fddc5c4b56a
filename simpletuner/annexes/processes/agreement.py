"""Checks that all processes of a run make the same plan; otherwise they stop and report the
differences.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path

from simpletuner.budget.budget import Budget
from simpletuner.distributed.world import World
from simpletuner.errors import ConfigError, Problem, shorten
from simpletuner.hashing import hash_file, hash_json
from simpletuner.planning.plans import Plan
from simpletuner.planning.resume import identify


def plan_in_every_process(world: World, make: Callable[[int | None], Budget]) -> Budget:
    """The plan of all processes, and its estimate, made by each: first by the main one, which also
    draws the seed, then by one on each further machine, which may download, then by the rest.

    Args:
        make: makes the plan with a seed; None draws one.

    Raises:
        ConfigError: this process cannot make the plan, or plans differ from that of rank 0.
    """
    first = world.main_only(lambda: make(None))
    seed = world.broadcast(first.plan.seed if first else None)
    # Processes of one machine share its download cache: the leader fills it, the rest only read.
    made = world.leader_first(lambda: first or make(seed))
    problems = differences(world.gather((socket.gethostname(), agreed_values(made.plan))))
    if problems:
        raise ConfigError(problems)
    return made


def agreed_values(plan: Plan) -> dict[str, str]:
    """Values that must be equal in all processes, by the name that error messages use."""
    config = plan.config
    identity = identify(plan)
    step = "the beginning" if plan.resume is None else plan.resume.path.name
    return {
        **{
            key: repr(value)
            for key, value in {**identity.settings, **identity.order, **config.flat}.items()
        },
        **{f"version of {name}": version for name, version in identity.versions.items()},
        **{f"content of {role}": digest[:12] for role, digest in identity.weights.items()},
        "data_backend_config": f"a list of samples with the digest {identity.datasets[:12]}",
        "content of simpletuner": source_digest(),
        "seed": str(plan.seed),
        "resume_from_checkpoint": f"{config.run.resume_from_checkpoint!r}, which is {step}",
    }


def source_digest() -> str:
    """A hash of this package's source: two checkouts of one version may differ."""
    folder = Path(__file__).parents[2]
    files = {path.relative_to(folder).as_posix(): hash_file(path) for path in folder.rglob("*.py")}
    return hash_json(files)[:12]


def differences(described: list[tuple[str, Mapping[str, str]]]) -> list[Problem]:
    """The values that differ from those of process 0, with the processes that have them."""
    _, first = described[0]
    places: dict[tuple[str, str, str], list[str]] = {}
    for rank, (host, values) in enumerate(described):
        for key in first.keys() | values.keys():
            expected = first.get(key, "absent")
            actual = values.get(key, "absent")
            if actual != expected:
                # Processes with the same difference share a line of the error.
                places.setdefault((key, expected, actual), []).append(f"{rank} on {host}")
    return [
        Problem(
            key, f"is {expected} in the first process, but {actual} in process {shorten(where, 4)}."
        )
        for (key, expected, actual), where in sorted(places.items())
    ]
