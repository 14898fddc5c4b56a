"""What a run does now, or how it ended, in one sentence and in a few words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.annexes.runs.history import RunHistory, StageTurn
from simpletuner.annexes.runs.state import Status
from simpletuner.errors import counted
from simpletuner.reporting.wording import about_text, clock_text

# Words for states on the page; the page of `GET /api/training/status` has the names.
LABELS: Mapping[Status, str] = {
    "idle": "not started",
    "starting": "starting",
    "running": "running",
    "completed": "finished",
    "error": "failed",
    "cancelled": "cancelled",
    "interrupted": "interrupted",
    "broken": "damaged",
}
NOT_STARTED = "Not started yet."
# Stages whose label in the terminal says more to programmers than to users.
STAGES = {"init_torch": "Loading PyTorch", "init_load_base_model": "Loading the model"}
# Rounds of previews: of the untrained model, along the way and of the result.
PREVIEW_STAGES = {"benchmark_base_model", "validation", "final_validation"}
# Seconds after which a stage without a count shows how long it has run.
PATIENCE = 5.0


@dataclass(frozen=True)
class Now:
    """What an active run does.

    Attributes:
        stage: its stage in a few words.
        sentence: the stage, how far it is, and the time left.
        done, total: what its bar shows; without a total there is no bar.
    """

    stage: str
    sentence: str
    done: int = 0
    total: int | None = None


def preparing(history: RunHistory, since: float, clock: float) -> Now:
    """What a run does before its loop.

    Args:
        since: Unix time at which the run was started.
        clock: the present Unix time.
    """
    turn = running_turn(history)
    if turn is not None:
        text = f"{stage_text(turn, history, clock)}."
        return Now(stage_name(turn), text, turn.done, turn.total)
    stage = "Preparing the training"
    if not history.id:
        stage = "Checking the settings and the files"
    return Now(stage, f"{stage}{elapsed_text(since, clock)}.")


def training(history: RunHistory, progress: Mapping[str, Any], clock: float) -> Now:
    """What a run does in its loop, and after it until the end.

    Args:
        progress: the progress of the steps, as the status has it.
        clock: the present Unix time.
    """
    step = progress["current"]
    total = progress["total"]
    turn = running_turn(history)
    if history.status == "stopping":
        return _stopping(turn, history, progress, clock)
    if turn is not None:
        return _between_steps(turn, history, progress, clock)
    if total is not None and step >= total:
        stage = "Saving and checking the result"
        return Now(stage, f"{stage}{elapsed_text(history.at, clock)}.", step, total)
    if progress["eta_seconds"] is None:
        return Now("Training", f"Training, {steps_text(progress)}.", step, total)
    left = left_text(time_left(history, progress, clock))
    return Now("Training", f"Training, {steps_text(progress)}, {left}.", step, total)


def _between_steps(
    turn: StageTurn, history: RunHistory, progress: Mapping[str, Any], clock: float
) -> Now:
    """What a run does while a stage interrupts its steps, and what follows."""
    step = progress["current"]
    total = progress["total"]
    sentence = f"{stage_text(turn, history, clock)}."
    if total is not None and step >= total:
        return Now(stage_name(turn), f"Finishing. {sentence}", step, total)
    rest = steps_text(progress)
    if progress["eta_seconds"] is not None:
        rest += f", {left_text(time_left(history, progress, clock))} in all"
    return Now(stage_name(turn), f"{sentence} Then training goes on: {rest}.", step, total)


def _stopping(
    turn: StageTurn | None, history: RunHistory, progress: Mapping[str, Any], clock: float
) -> Now:
    """What a run still does that was asked to stop."""
    rest = f"{stage_text(turn, history, clock)}." if turn else "The last step is being saved."
    return Now("Stopping", f"Stopping. {rest}", progress["current"], progress["total"])


def steps_text(progress: Mapping[str, Any]) -> str:
    """`step 120 of 300`"""
    text = f"step {progress['current']:,}"
    if progress["total"]:
        text += f" of {progress['total']:,}"
    return text


def running_turn(history: RunHistory) -> StageTurn | None:
    """The stage that runs; the last one to begin, if there are several."""
    running = [turn for turn in history.turns if turn.status == "running"]
    return running[-1] if running else None


def stage_name(turn: StageTurn) -> str:
    """A stage in the words of the page."""
    return STAGES.get(turn.key, turn.label)


def stage_text(turn: StageTurn, history: RunHistory, clock: float) -> str:
    """`Rendering previews at step 100: 4 of 6, about 20 s left`"""
    text = stage_name(turn)
    if not turn.total:
        return text + elapsed_text(turn.began, clock)
    text += f": {turn.done:,} of {turn.total:,}"
    left = stage_left(history, turn, clock)
    return text if left is None else f"{text}, {left_text(left)}"


def stage_left(history: RunHistory, turn: StageTurn, clock: float) -> float | None:
    """Seconds left of a stage; None if they are not known."""
    progress = history.stages[turn.key]["progress"] or {}
    eta = progress.get("eta_seconds")
    if eta is not None:
        return max(0.0, eta - elapsed(history.at, clock))
    # Nothing of this turn is measured yet, so the last one counts.
    earlier = [each.seconds for each in history.turns if is_alike(each, turn) and each.seconds]
    return max(0.0, earlier[-1] - elapsed(turn.began, clock)) if earlier else None


def is_alike(one: StageTurn, other: StageTurn) -> bool:
    """Whether two turns do the same work."""
    return one.key == other.key or {one.key, other.key} <= PREVIEW_STAGES


def time_left(history: RunHistory, progress: Mapping[str, Any], clock: float) -> float:
    """Seconds to the end of a run.

    The last step estimated them, with the previews, evaluations and saves after it.
    """
    left = max(0.0, progress["eta_seconds"] - elapsed(history.step_at, clock))
    turn = running_turn(history)
    if turn is None:
        return left
    return max(left, stage_left(history, turn, clock) or 0.0)


def elapsed(moment: float, clock: float) -> float:
    """Seconds from a moment of a run until now; 0 if the run's clock is ahead of this one."""
    return max(0.0, clock - moment)


def left_text(seconds: float) -> str:
    """`about 20 s left`, `a few seconds left`"""
    if seconds < 8:
        return "a few seconds left"
    return f"about {about_text(seconds)} left"


def elapsed_text(since: float, clock: float) -> str:
    """`, for 12 s`; empty for a stage that has just begun."""
    seconds = elapsed(since, clock) if since else 0.0
    return f", for {about_text(seconds)}" if seconds >= PATIENCE else ""


def finished(steps: int, history: RunHistory, file: str) -> str:
    """How a run has ended that has all its steps.

    Args:
        file: what was verified: `file`, `pipeline`, or empty if it is gone.
    """
    time = ""
    # Of a run of several sessions, the events have only the last one.
    if history.began and history.start_step == 0:
        time = f" in {clock_text(history.at - history.began)}"
    text = f"Finished: {counted(steps, 'step')}{time}."
    return f"{text} The {file} loads in diffusers." if file else text


def failed(step: int) -> str:
    """Where a run has failed; its message says why."""
    return f"Failed after step {step:,}." if step else "Failed before the first step."
