"""Compares a finished run with its estimate, and stores the densities of attention that it
measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from statistics import fmean, median

from simpletuner.budget.budget import Budget, round_seconds
from simpletuner.budget.densities import remember_densities
from simpletuner.budget.device import gigabytes
from simpletuner.errors import WriteError
from simpletuner.planning.plans import Plan
from simpletuner.reporting.events import PREVIEWS, Event, EventStream, PhaseEnded, StepReport
from simpletuner.run.companions import Companion, Ledger
from simpletuner.run.session import Session

FEWEST = 10  # minimum number of steps for a comparison


@dataclass
class Comparison(Companion):
    """Companion that records durations and peak memory of a session."""

    events: EventStream
    steps: defaultdict[Hashable, list[float]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    densities: defaultdict[int, list[float]] = field(
        default_factory=lambda: defaultdict(list), init=False
    )
    rounds: list[float] = field(default_factory=list, init=False)
    peak: float = field(default=0.0, init=False)
    planned: Budget | None = field(default=None, init=False)

    def begin(self, plan: Plan, step: int) -> None:
        self.events.subscribe("The comparison with the estimate", self._note)

    def around(self, session: Session, budget: Budget) -> AbstractContextManager[object]:
        self.planned = budget
        return nullcontext()

    def _note(self, event: Event) -> None:
        match event:
            case StepReport():
                # Only steps with equal shapes and passes are comparable.
                self.steps[event.shapes, event.passes].append(event.seconds)
                self.peak = max(self.peak, event.memory_bytes or 0)
                for tokens, density in event.densities.items():
                    self.densities[tokens].append(density)
            case PhaseEnded() if event.complete and event.phase.kind == PREVIEWS:
                self.rounds.append(event.seconds)

    def finish(self, ledger: Ledger) -> str:
        budget = self.planned
        count = sum(len(seconds) for seconds in self.steps.values())
        if budget is None or count < FEWEST:
            return ""

        # Medians, since the first step of a shape also compiles.
        total = sum(len(seconds) * median(seconds) for seconds in self.steps.values())
        parts = [_compared("step", total / count, budget.step_seconds)]
        expected_round = round_seconds(budget)
        if self.rounds and expected_round:
            parts.append(_compared("round of previews", median(self.rounds), expected_round))
        needed = max(phase.needed(budget.device) for phase in budget.phases)
        parts.append(f"peak {gigabytes(self.peak)}, planned {gigabytes(needed)}")
        if problem := self._remember(budget):
            parts.append(f"not stored for the next estimate: {problem}")
        return f"Estimate and run: {'; '.join(parts)}."

    def _remember(self, budget: Budget) -> str:
        """Store the measured densities, if any; returns why that failed, which ends no run."""
        densities = {tokens: fmean(shares) for tokens, shares in self.densities.items()}
        if not densities:
            return ""
        try:
            remember_densities(budget.plan, budget.workload, budget.device, densities)
        except (OSError, WriteError) as error:
            return str(error)
        return ""


def _compared(what: str, seconds: float, predicted: float) -> str:
    return f"{what} {seconds:.3g} s, predicted {predicted:.3g} s"
