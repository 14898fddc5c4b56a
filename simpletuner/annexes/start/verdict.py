"""Whether a new run suits a machine: its plan, before anything is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from simpletuner.annexes.fitting.ready import needs_consent, plan_that_fits
from simpletuner.annexes.start.new_run import FILES, NewRun
from simpletuner.annexes.start.recipe import TITLES
from simpletuner.budget.budget import Budget, remaining_seconds
from simpletuner.budget.device import gigabytes
from simpletuner.config.sources import Arguments, config_from_values
from simpletuner.errors import ConfigError
from simpletuner.reporting.wording import duration_text


@dataclass(frozen=True)
class Verdict:
    """Whether a run suits a machine, and a few words on why, or how long it takes."""

    suits: bool
    words: str


@contextmanager
def unwritten(run: NewRun) -> Iterator[Arguments]:
    """A context with the settings of a run that is not written yet, to plan it.

    Files without captions get the trigger words: missing captions say nothing about the model.
    """
    planned = replace(run, captions=not run.media.uncaptioned)
    with TemporaryDirectory() as name:
        planned.write(Path(name))
        files: list[tuple[str, object]] = [(key, f"{name}/{file}") for key, file in FILES.items()]
        yield Arguments(files, base=config_from_values(planned.config()), device=run.device)


def plan_new_run(run: NewRun) -> Budget:
    """The plan with its estimate; nothing is written.

    Raises:
        ConfigError: with all problems at once, including a run that does not fit.
    """
    with unwritten(run) as arguments:
        return plan_that_fits(arguments)


def judge_new_run(run: NewRun) -> Verdict:
    """Whether the run suits the machine that is planned for, and how long it takes."""
    if run.is_demo:
        words = "tiny: minutes on a CPU, no download; it draws simple shapes"
        return Verdict(True, f"{words}, to try everything with")
    try:
        budget = plan_new_run(run)
    except ConfigError as error:
        if any(problem.where == "memory" for problem in error.problems):
            return Verdict(False, "does not fit this machine")
        return Verdict(False, "cannot be planned")
    time = f"about {duration_text(sum(remaining_seconds(budget)))}"
    if not budget.device.is_gpu:
        words = f"no GPU here: {time} on the CPU, with previews"
        return Verdict(not needs_consent(budget), words)
    memory = gigabytes(max(phase.needed(budget.device) for phase in budget.phases))
    return Verdict(True, f"fits, {time} with previews, up to {memory}; {TITLES[run.example]}")
