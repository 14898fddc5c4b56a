"""What runs took relative to their estimates, which corrects the estimates of later runs on the same machine.

`outcomes.json` in the cache folder: device -> what was trained -> `Outcome`. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low

from pydantic import PositiveFloat, RootModel

from simpletuner.atomic import changing, write_atomically
from simpletuner.budget.device import Device
from simpletuner.budget.workload import Workload
from simpletuner.config.values import read_stored
from simpletuner.distributed.world import compute_threads
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import machine_folder

OUTCOMES_FILE = "outcomes.json"
LATEST = 5  # runs of which the usual one corrects: a single one may have shared its device with other programs


@dataclass(frozen=True)
class Outcome:
    """How long runs took, by how long they were estimated to take.

    Attributes:
        day: when the last one ended, such as 2026-11-20.
        step, previews: of a step, and of a round of previews.
        densities: share of the tiles that block-sparse attention visited, by tokens of a sample.
        latest: step and previews of each of the latest runs; those above are their lower medians.
    """

    day: str
    step: PositiveFloat = 1.0
    previews: PositiveFloat = 1.0
    densities: Mapping[int, PositiveFloat] = field(default_factory=dict)
    latest: Sequence[tuple[PositiveFloat, PositiveFloat]] = ()


UNCORRECTED = Outcome("")


class Outcomes(RootModel[dict[str, dict[str, Outcome]]]):
    """The file."""


def find_outcome(plan: Plan, workload: Workload, device: Device) -> Outcome:
    """The outcome of the latest runs of this kind on this device, else `UNCORRECTED`."""
    runs = _read(machine_folder(plan)).root.get(_machine(device), {})
    return runs.get(kind_of_run(plan, workload), UNCORRECTED)


def remember(plan: Plan, workload: Workload, device: Device, outcome: Outcome) -> None:
    """Add the outcome of a run to those that correct later plans.

    Raises:
        OSError: the folder is not writable.
        WriteError: no space is left.
    """
    folder = machine_folder(plan)
    with changing(folder / OUTCOMES_FILE):
        known = _read(folder)  # other runs may have written meanwhile
        runs, kind = known.root.setdefault(_machine(device), {}), kind_of_run(plan, workload)
        latest = [*runs.get(kind, UNCORRECTED).latest, (outcome.step, outcome.previews)][-LATEST:]
        step, previews = map(median_low, zip(*latest, strict=True))
        runs[kind] = replace(outcome, step=step, previews=previews, latest=latest)
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
