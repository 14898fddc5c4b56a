"""Compares a run with its estimate when it ends, and corrects the next estimate of its kind on the same machine.

`outcomes.json` in the cache folder: device -> kind of run -> `Outcome`. Free of torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pydantic import RootModel, ValidationError

from simpletuner.atomic import write_atomically
from simpletuner.budget.budget import Budget, Outcome, make_budget, round_seconds
from simpletuner.budget.device import Device, gigabytes
from simpletuner.budget.workload import buckets_of
from simpletuner.distributed.world import compute_threads
from simpletuner.errors import WriteError
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import machine_folder
from simpletuner.reporting.events import PREVIEWS, Event, EventStream, PhaseEnded, StepReport
from simpletuner.run.companions import Companion, Ledger

if TYPE_CHECKING:
    from simpletuner.run.session import Session

OUTCOMES_FILE = "outcomes.json"
FEWEST = 10  # steps that are worth a comparison


class Outcomes(RootModel[dict[str, dict[str, Outcome]]]):
    """The file."""


def corrected_budget(plan: Plan, device: Device) -> Budget:
    """The estimate of a plan, corrected by the last run of its kind on this device."""
    return corrected(make_budget(plan, device), plan)


def corrected(budget: Budget, plan: Plan) -> Budget:
    runs = _read(machine_folder(plan)).root.get(_machine(budget.device), {})
    return replace(budget, outcome=runs.get(kind_of_run(plan)))


def remember(plan: Plan, device: Device, outcome: Outcome) -> None:
    """Store an outcome for later plans.

    Raises:
        OSError: the folder is not writable.
        WriteError: no space is left.
    """
    folder = machine_folder(plan)
    known = _read(folder)  # other runs may have written meanwhile
    known.root.setdefault(_machine(device), {})[kind_of_run(plan)] = outcome
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / OUTCOMES_FILE, known.model_dump_json(indent=1))


def kind_of_run(plan: Plan) -> str:
    """Model, kind of training, processes, and the largest bucket: what estimates are off by depends on these."""
    buckets, count = buckets_of(plan), plan.config.launch.num_processes
    shape = buckets[0].label if buckets else "previews"
    processes = f", {count} processes" if count > 1 else ""
    return f"{plan.spec.name} {plan.flavour.name}, {plan.config.model.model_type}, {shape}{processes}"


def _machine(device: Device) -> str:
    return device.name if device.is_gpu else f"{device.name}, {compute_threads()} of its cores"


def _read(folder: Path) -> Outcomes:
    try:
        return Outcomes.model_validate_json((folder / OUTCOMES_FILE).read_bytes())
    except (OSError, ValidationError):  # estimates do without it
        return Outcomes({})


@dataclass
class Comparison(Companion):
    """Companion that notes durations and peak memory of a session."""

    events: EventStream
    steps: defaultdict[Hashable, list[float]] = field(default_factory=lambda: defaultdict(list), init=False)
    rounds: list[float] = field(default_factory=list, init=False)
    peak: float = field(default=0.0, init=False)
    planned: tuple[Plan, Budget] | None = field(default=None, init=False)

    def begin(self, plan: Plan, step: int) -> None:
        self.events.subscribe(self._note)

    def around(self, session: Session, budget: Budget) -> AbstractContextManager[object]:
        self.planned = session.plan, budget
        return nullcontext()

    def _note(self, event: Event) -> None:
        match event:
            case StepReport():
                # Only steps of equal shapes and passes take comparable time.
                self.steps[event.shapes, event.passes].append(event.seconds)
                self.peak = max(self.peak, event.memory_bytes or 0)
            case PhaseEnded() if event.complete and event.phase.kind == PREVIEWS:
                self.rounds.append(event.seconds)

    def finish(self, ledger: Ledger) -> str:
        count = sum(map(len, self.steps.values()))
        if self.planned is None or count < FEWEST:
            return ""
        plan, budget = self.planned
        # Medians, since the first step of a shape also compiles.
        step = sum(len(each) * median(each) for each in self.steps.values()) / count
        known, expected = budget.outcome or Outcome(""), round_seconds(plan, budget)
        parts = [_compared("step", step, budget.step_seconds)]
        previews = known.previews
        if self.rounds and expected:
            found = median(self.rounds)
            previews *= found / expected
            parts.append(_compared("round of previews", found, expected))
        needed = max(phase.needed(budget.device) for phase in budget.phases)
        parts.append(f"peak {gigabytes(self.peak)}, planned {gigabytes(needed)}")
        day = datetime.now(UTC).date().isoformat()
        outcome = Outcome(day, known.step * step / budget.step_seconds, previews)
        try:
            remember(plan, budget.device, outcome)
        except (OSError, WriteError) as error:  # the next estimate does without it
            parts.append(f"not stored for the next estimate: {error}")
        return f"Estimate and run: {'; '.join(parts)}."


def _compared(what: str, seconds: float, predicted: float) -> str:
    return f"{what} {seconds:.3g} s, predicted {predicted:.3g} s"
