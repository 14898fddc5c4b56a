"""What to do next with a run on disk."""

from __future__ import annotations

from collections.abc import Mapping

from simpletuner.annexes.advice import next_step as advice
from simpletuner.annexes.advice.facts import LastSession, State, facts_of_run, read_files
from simpletuner.annexes.advice.next_step import NextStep
from simpletuner.annexes.runs.history import RunHistory
from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.runs.state import Status, Verdict

STATES: Mapping[Status, State] = {
    "running": "running",
    "completed": "finished",
    "cancelled": "stopped",
    "interrupted": "stopped",
    "error": "failed",
}


def next_step_of(run: Run) -> NextStep | None:
    """What to do next with a run; None if its record does not decide, or it has not begun.

    Raises:
        UserError: the lock of the folder is damaged.
    """
    verdict = run.judge()
    state = STATES.get(verdict.status)
    if state is None:
        return None
    return advice.next_step(facts_of_run(run.folder, run.metrics, session_of(verdict, state)))


def session_of(verdict: Verdict, state: State) -> LastSession:
    """The session of a run as its events report it."""
    history = verdict.history
    return LastSession(
        state=state,
        total_steps=history.progress.get("total"),
        files=read_files(history.summary, history.notices),
        message=f"{history.message}\n{verdict.message}",
        passes=passes_in(history),
    )


def passes_in(history: RunHistory) -> int:
    """The losses that the newest evaluation measures; 0 if unknown."""
    stage = history.stages.get("evaluation", {})
    progress = stage.get("progress") or {}
    return progress.get("total") or 0
