"""Compares a finished run with its estimate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import median

from simpletuner.budget.budget import Budget, round_seconds
from simpletuner.budget.device import gigabytes
from simpletuner.plan.build import Plan
from simpletuner.reporting.events import PREVIEWS, Event, EventStream, PhaseEnded, StepReport
from simpletuner.run.companions import Companion, Ledger
from simpletuner.run.session import Session

FEWEST = 10  # minimum number of steps for a comparison


@dataclass
class Comparison(Companion):
    """Companion that records durations and peak memory of a session."""

    events: EventStream
    steps: defaultdict[Hashable, list[float]] = field(default_factory=lambda: defaultdict(list), init=False)
    rounds: list[float] = field(default_factory=list, init=False)
    peak: float = field(default=0.0, init=False)
    planned: Budget | None = field(default=None, init=False)

    def begin(self, plan: Plan, step: int) -> None:
        self.events.subscribe(self._note)

    def around(self, session: Session, budget: Budget) -> AbstractContextManager[object]:
        self.planned = budget
        return nullcontext()

    def _note(self, event: Event) -> None:
        match event:
            case StepReport():
                # Only steps with equal shapes and passes are comparable.
                self.steps[event.shapes, event.passes].append(event.seconds)
                self.peak = max(self.peak, event.memory_bytes or 0)
            case PhaseEnded() if event.complete and event.phase.kind == PREVIEWS:
                self.rounds.append(event.seconds)

    def finish(self, ledger: Ledger) -> str:
        count, budget = sum(map(len, self.steps.values())), self.planned
        if budget is None or count < FEWEST:
            return ""
        # Medians, since the first step of a shape also compiles.
        step = sum(len(each) * median(each) for each in self.steps.values()) / count
        parts = [_compared("step", step, budget.step_seconds)]
        if self.rounds and (expected := round_seconds(budget)):
            parts.append(_compared("round of previews", median(self.rounds), expected))
        needed = max(phase.needed(budget.device) for phase in budget.phases)
        parts.append(f"peak {gigabytes(self.peak)}, planned {gigabytes(needed)}")
        return f"Estimate and run: {'; '.join(parts)}."


def _compared(what: str, seconds: float, predicted: float) -> str:
    return f"{what} {seconds:.3g} s, predicted {predicted:.3g} s"
