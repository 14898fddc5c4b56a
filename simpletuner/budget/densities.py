"""Measured densities of block-sparse attention (NABLA), for later estimates on the same machine.

`outcomes.json` in the cache folder: device -> kind of run -> `Outcome`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import PositiveFloat, RootModel

from simpletuner.atomic import locked_for_change, write_atomically
from simpletuner.budget.device import Device
from simpletuner.budget.workload import Workload
from simpletuner.config.json_reader import read_stored
from simpletuner.distributed.world import compute_threads
from simpletuner.planning.entries import machine_folder
from simpletuner.planning.plans import SamplePlan

OUTCOMES_FILE = "outcomes.json"


@dataclass(frozen=True)
class Outcome:
    """What runs of a kind measured.

    Attributes:
        densities: share of tiles visited by block-sparse attention, by tokens of a sample.
    """

    densities: Mapping[int, PositiveFloat] = field(default_factory=dict)


class Outcomes(RootModel[dict[str, dict[str, Outcome]]]):
    """The file."""


def find_densities(plan: SamplePlan, workload: Workload, device: Device) -> Mapping[int, float]:
    """The densities that runs of this kind measured on this device, by tokens of a sample."""
    runs = _read(machine_folder(plan)).root.get(_machine(device), {})
    return runs.get(kind_of_run(plan, workload), Outcome()).densities


def remember_densities(
    plan: SamplePlan, workload: Workload, device: Device, densities: Mapping[int, float]
) -> None:
    """Store measured densities for later plans; those of other lengths are kept.

    Raises:
        OSError: the folder is not writable.
        WriteError: no space left.
    """
    folder = machine_folder(plan)
    with locked_for_change(folder / OUTCOMES_FILE):
        outcomes = _read(folder)  # read again, since other runs may have written
        runs = outcomes.root.setdefault(_machine(device), {})
        kind = kind_of_run(plan, workload)
        earlier = runs.get(kind, Outcome()).densities
        runs[kind] = Outcome({**earlier, **densities})
        write_atomically(folder / OUTCOMES_FILE, outcomes.model_dump_json(indent=1).encode())


def kind_of_run(plan: SamplePlan, workload: Workload) -> str:
    """Model, kind of training, processes, and the largest bucket, on which densities depend."""
    config = plan.config
    shape = workload.buckets[0].label if workload.buckets else "previews"
    count = config.launch.num_processes
    processes = f", {count} processes" if count > 1 else ""
    return f"{plan.spec.name} {plan.flavour.name}, {config.model.model_type}, {shape}{processes}"


def _machine(device: Device) -> str:
    return device.name if device.is_gpu else f"{device.name}, {compute_threads()} of its cores"


def _read(folder: Path) -> Outcomes:
    return read_stored(folder / OUTCOMES_FILE, Outcomes) or Outcomes({})  # estimates do without it
