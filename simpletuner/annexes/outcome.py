"""Compares a finished run with its estimate, and stores the measured densities of attention."""

from __future__ import annotations

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
    # Seconds of steps by their shapes and passes: only equal ones are comparable.
    steps: dict[Hashable, list[float]] = field(default_factory=dict, init=False)
    # Densities of attention by number of tokens.
    densities: dict[int, list[float]] = field(default_factory=dict, init=False)
    # Seconds of rounds of previews.
    rounds: list[float] = field(default_factory=list, init=False)
    peak: float = field(default=0.0, init=False)  # bytes
    planned: Budget | None = field(default=None, init=False)

    def begin(self, plan: Plan, step: int) -> None:
        self.events.subscribe("The comparison with the estimate", self._note)

    def around(self, session: Session, budget: Budget) -> AbstractContextManager[object]:
        self.planned = budget
        return nullcontext()

    def _note(self, event: Event) -> None:
        match event:
            case StepReport():
                self.steps.setdefault((event.shapes, event.passes), []).append(event.seconds)
                self.peak = max(self.peak, event.memory_bytes or 0)
                for tokens, density in event.densities.items():
                    self.densities.setdefault(tokens, []).append(density)
            case PhaseEnded() if event.complete and event.phase.kind == PREVIEWS:
                self.rounds.append(event.seconds)

    def finish(self, ledger: Ledger) -> str:
        budget = self.planned
        count = sum(len(seconds) for seconds in self.steps.values())
        if budget is None or count < FEWEST:
            return ""

        # Medians, since the first step of a shape also compiles.
        total = sum(len(seconds) * median(seconds) for seconds in self.steps.values())
        parts = [_compare("step", total / count, budget.step_seconds)]
        expected_round = round_seconds(budget)
        if self.rounds and expected_round:
            parts.append(_compare("round of previews", median(self.rounds), expected_round))
        needed = max(phase.needed(budget.device) for phase in budget.phases)
        parts.append(f"peak {gigabytes(self.peak)}, planned {gigabytes(needed)}")
        failure = self._store_densities(budget)
        if failure:
            parts.append(f"not stored for the next estimate: {failure}")
        return f"Estimate and run: {'; '.join(parts)}."

    def _store_densities(self, budget: Budget) -> str:
        """Store the measured densities, if any; returns why that failed, which is not an error."""
        densities = {tokens: fmean(shares) for tokens, shares in self.densities.items()}
        if not densities:
            return ""
        try:
            remember_densities(budget.plan, budget.workload, budget.device, densities)
        except (OSError, WriteError) as error:
            return str(error)
        return ""


def _compare(what: str, seconds: float, predicted: float) -> str:
    return f"{what} {seconds:.3g} s, predicted {predicted:.3g} s"
