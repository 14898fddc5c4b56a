"""Compares a finished run with its estimate, and stores the difference to correct later estimates."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median

from simpletuner.budget.budget import Budget, round_seconds
from simpletuner.budget.device import gigabytes
from simpletuner.budget.outcomes import Outcome, remember
from simpletuner.errors import WriteError
from simpletuner.plan.build import Plan
from simpletuner.reporting.events import PREVIEWS, Event, EventStream, PhaseEnded, StepReport
from simpletuner.run.companions import Companion, Ledger
from simpletuner.run.session import Session

FEWEST = 10  # minimum number of steps for a comparison
CONTENDED = 0.25  # maximum share of time spent waiting for a core; beyond it, other programs distort the measurement


@dataclass
class Comparison(Companion):
    """Companion that records durations and peak memory of a session."""

    events: EventStream
    steps: defaultdict[Hashable, list[float]] = field(default_factory=lambda: defaultdict(list), init=False)
    densities: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list), init=False)
    rounds: list[float] = field(default_factory=list, init=False)
    peak: float = field(default=0.0, init=False)
    planned: Budget | None = field(default=None, init=False)
    began: tuple[float, float] = field(default=(0.0, 0.0), init=False)

    def begin(self, plan: Plan, step: int) -> None:
        self.events.subscribe(self._note)

    def around(self, session: Session, budget: Budget) -> AbstractContextManager[object]:
        self.planned, self.began = budget, (time.perf_counter(), _seconds_without_core())
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
        count, budget = sum(map(len, self.steps.values())), self.planned
        if budget is None or count < FEWEST:
            return ""
        # Medians, since the first step of a shape also compiles.
        step = sum(len(each) * median(each) for each in self.steps.values()) / count
        known, expected = budget.outcome, round_seconds(budget)
        parts = [_compared("step", step, budget.step_seconds)]
        previews = known.previews
        if self.rounds and expected:
            measured = median(self.rounds)
            previews *= measured / expected
            parts.append(_compared("round of previews", measured, expected))
        needed = max(phase.needed(budget.device) for phase in budget.phases)
        parts.append(f"peak {gigabytes(self.peak)}, planned {gigabytes(needed)}")
        day = datetime.now(UTC).date().isoformat()
        densities = {**known.densities, **{tokens: fmean(each) for tokens, each in self.densities.items()}}
        # The next estimate uses the measured densities, so the correction covers only the rest of the difference.
        informed = replace(budget, parts=budget.parts.with_densities(densities))
        outcome = Outcome(day, known.step * step / informed.step_seconds, previews, densities)
        if problem := self._problem() or _stored(budget, outcome):
            parts.append(f"not stored for the next estimate: {problem}")
        return f"Estimate and run: {'; '.join(parts)}."

    def _problem(self) -> str:
        """Why the measurement is not representative; empty if it is."""
        began, waited = self.began
        share = (_seconds_without_core() - waited) / (time.perf_counter() - began)
        return f"other programs used its CPU core for {share:.0%} of the time" if share > CONTENDED else ""


def _stored(budget: Budget, outcome: Outcome) -> str:
    """Store an outcome; returns why that failed, which ends no run."""
    try:
        remember(budget.plan, budget.workload, budget.device, outcome)
    except (OSError, WriteError) as error:
        return str(error)
    return ""


def _seconds_without_core() -> float:
    """Seconds that this thread has waited for a core since it started; 0 if the system does not report them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def _compared(what: str, seconds: float, predicted: float) -> str:
    return f"{what} {seconds:.3g} s, predicted {predicted:.3g} s"
