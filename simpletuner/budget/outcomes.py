"""What runs took relative to their estimates, which corrects the estimates of later runs on the same machine.

`outcomes.json` in the cache folder: device -> what was trained -> `Outcome`. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import PositiveFloat, RootModel

from simpletuner.atomic import changing, write_atomically
from simpletuner.budget.device import Device
from simpletuner.budget.workload import Workload
from simpletuner.config.values import read_stored
from simpletuner.distributed.world import compute_threads
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import machine_folder

OUTCOMES_FILE = "outcomes.json"


@dataclass(frozen=True)
class Outcome:
    """How long a run took, by how long it was estimated to take.

    Attributes:
        day: when it ended, such as 2026-11-20.
        step, previews: of a step, and of a round of previews.
        densities: share of the tiles that block-sparse attention visited, by tokens of a sample.
    """

    day: str
    step: PositiveFloat = 1.0
    previews: PositiveFloat = 1.0
    densities: Mapping[int, PositiveFloat] = field(default_factory=dict)


UNCORRECTED = Outcome("")


class Outcomes(RootModel[dict[str, dict[str, Outcome]]]):
    """The file."""


def find_outcome(plan: Plan, workload: Workload, device: Device) -> Outcome:
    """That of the last run of this kind on this device; `UNCORRECTED` without one."""
    runs = _read(machine_folder(plan)).root.get(_machine(device), {})
    return runs.get(kind_of_run(plan, workload), UNCORRECTED)


def remember(plan: Plan, workload: Workload, device: Device, outcome: Outcome) -> None:
    """Store an outcome for later plans.

    Raises:
        OSError: the folder is not writable.
        WriteError: no space is left.
    """
    folder = machine_folder(plan)
    with changing(folder / OUTCOMES_FILE):
        known = _read(folder)  # other runs may have written meanwhile
        known.root.setdefault(_machine(device), {})[kind_of_run(plan, workload)] = outcome
        write_atomically(folder / OUTCOMES_FILE, known.model_dump_json(indent=1).encode())


def kind_of_run(plan: Plan, workload: Workload) -> str:
    """Model, kind of training, processes, and the largest bucket: what estimates are off by depends on these."""
    config = plan.config
    shape = workload.buckets[0].label if workload.buckets else "previews"
    count = config.launch.num_processes
    processes = f", {count} processes" if count > 1 else ""
    return f"{plan.spec.name} {plan.flavour.name}, {config.model.model_type}, {shape}{processes}"


def _machine(device: Device) -> str:
    return device.name if device.is_gpu else f"{device.name}, {compute_threads()} of its cores"


def _read(folder: Path) -> Outcomes:
    return read_stored(folder / OUTCOMES_FILE, Outcomes) or Outcomes({})  # estimates do without it
