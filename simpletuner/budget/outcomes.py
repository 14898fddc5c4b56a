"""Actual relative to estimated durations of runs, which correct later estimates on the same machine.

`outcomes.json` in the cache folder: device -> kind of run -> `Outcome`. Imports no torch.
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
LATEST = 5  # runs whose median is used, since a single run may have shared its device with other programs


@dataclass(frozen=True)
class Outcome:
    """Actual durations of runs, divided by the estimates.

    Attributes:
        day: end of the last run, such as 2026-11-20; empty without a correction.
        step, previews: ratio for a step, and for a round of previews.
        densities: share of tiles visited by block-sparse attention, by tokens of a sample.
        latest: (step, previews) of the latest runs, whose lower medians are `step` and `previews`.
        rates: the rates of the estimates, as the device's `note` describes them.
    """

    day: str
    step: PositiveFloat = 1.0
    previews: PositiveFloat = 1.0
    densities: Mapping[int, PositiveFloat] = field(default_factory=dict)
    latest: Sequence[tuple[PositiveFloat, PositiveFloat]] = ()
    rates: str = ""


UNCORRECTED = Outcome("")


class Outcomes(RootModel[dict[str, dict[str, Outcome]]]):
    """The file."""


def find_outcome(plan: Plan, workload: Workload, device: Device) -> Outcome:
    """The outcome of the latest runs of this kind on this device, else `UNCORRECTED`.

    A run that was estimated with other rates, such as assumed ones, only contributes its densities.
    """
    runs = _read(machine_folder(plan)).root.get(_machine(device), {})
    outcome = runs.get(kind_of_run(plan, workload), UNCORRECTED)
    return outcome if outcome.rates == device.note else Outcome("", densities=outcome.densities)


def remember(plan: Plan, workload: Workload, device: Device, outcome: Outcome) -> None:
    """Store the outcome of a run, to correct later plans.

    Raises:
        OSError: the folder is not writable.
        WriteError: no space left.
    """
    folder = machine_folder(plan)
    with changing(folder / OUTCOMES_FILE):
        known = _read(folder)  # read again, since other runs may have written
        runs, kind = known.root.setdefault(_machine(device), {}), kind_of_run(plan, workload)
        earlier = runs.get(kind, UNCORRECTED)
        comparable = earlier.latest if earlier.rates == device.note else ()
        latest = [*comparable, (outcome.step, outcome.previews)][-LATEST:]
        step, previews = map(median_low, zip(*latest, strict=True))
        runs[kind] = replace(outcome, rates=device.note, step=step, previews=previews, latest=latest)
        write_atomically(folder / OUTCOMES_FILE, known.model_dump_json(indent=1).encode())


def kind_of_run(plan: Plan, workload: Workload) -> str:
    """Model, kind of training, processes, and the largest bucket, on which the error of estimates depends."""
    config = plan.config
    shape = workload.buckets[0].label if workload.buckets else "previews"
    count = config.launch.num_processes
    processes = f", {count} processes" if count > 1 else ""
    return f"{plan.spec.name} {plan.flavour.name}, {config.model.model_type}, {shape}{processes}"


def _machine(device: Device) -> str:
    return device.name if device.is_gpu else f"{device.name}, {compute_threads()} of its cores"


def _read(folder: Path) -> Outcomes:
    return read_stored(folder / OUTCOMES_FILE, Outcomes) or Outcomes({})  # estimates do without it
