"""What a run does now, or how it ended, in one sentence and in a few words, in any language."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simpletuner.annexes.languages.say import say, say_counted, say_duration, say_label
from simpletuner.annexes.runs.history import RunHistory, StageTurn
from simpletuner.annexes.runs.state import Status
from simpletuner.reporting.wording import clock_text

# Words for states on the page, in English; `GET /api/training/status` has the names.
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
# What is known of the result of a finished run, by what was verified.
VERIFIED = {
    "file": "The file loads in diffusers.",
    "pipeline": "The pipeline loads in diffusers.",
}
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
        return Now(stage_name(turn), stage_sentence(turn, history, clock), turn.done, turn.total)
    stage = say("Preparing the training")
    if not history.id:
        stage = say("Checking the settings and the files")
    return Now(stage, lasting(stage, since, clock))


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
        stage = say("Saving and checking the result")
        return Now(stage, lasting(stage, history.at, clock), step, total)
    steps = steps_text(progress)
    sentence = say("Training, {steps}.", steps=steps)
    if progress["eta_seconds"] is not None:
        left = left_text(time_left(history, progress, clock))
        sentence = say("Training, {steps}, {left}.", steps=steps, left=left)
    return Now(say("Training"), sentence, step, total)


def _between_steps(
    turn: StageTurn, history: RunHistory, progress: Mapping[str, Any], clock: float
) -> Now:
    """What a run does while a stage interrupts its steps, and what follows."""
    step = progress["current"]
    total = progress["total"]
    now = stage_sentence(turn, history, clock)
    if total is not None and step >= total:
        return Now(stage_name(turn), say("Finishing. {now}", now=now), step, total)
    steps = steps_text(progress)
    sentence = say("{now} Then training goes on: {steps}.", now=now, steps=steps)
    if progress["eta_seconds"] is not None:
        left = left_text(time_left(history, progress, clock))
        sentence = say(
            "{now} Then training goes on: {steps}, {left} in all.", now=now, steps=steps, left=left
        )
    return Now(stage_name(turn), sentence, step, total)


def _stopping(
    turn: StageTurn | None, history: RunHistory, progress: Mapping[str, Any], clock: float
) -> Now:
    """What a run still does that was asked to stop."""
    now = say("The last step is being saved.")
    if turn is not None:
        now = stage_sentence(turn, history, clock)
    sentence = say("Stopping. {now}", now=now)
    return Now(say("Stopping"), sentence, progress["current"], progress["total"])


def steps_text(progress: Mapping[str, Any]) -> str:
    """`step 120 of 300`"""
    step = f"{progress['current']:,}"
    if not progress["total"]:
        return say("step {step}", step=step)
    return say("step {step} of {total}", step=step, total=f"{progress['total']:,}")


def running_turn(history: RunHistory) -> StageTurn | None:
    """The stage that runs; the last one to begin, if there are several."""
    running = [turn for turn in history.turns if turn.status == "running"]
    return running[-1] if running else None


def stage_name(turn: StageTurn) -> str:
    """A stage in the words of the page."""
    return say_label(STAGES.get(turn.key, turn.label))


def stage_sentence(turn: StageTurn, history: RunHistory, clock: float) -> str:
    """`Rendering previews at step 100: 4 of 6, about 20 s left.`"""
    stage = stage_name(turn)
    if not turn.total:
        return lasting(stage, turn.began, clock)
    counts = {"stage": stage, "done": f"{turn.done:,}", "total": f"{turn.total:,}"}
    left = stage_left(history, turn, clock)
    if left is None:
        return say("{stage}: {done} of {total}.", **counts)
    return say("{stage}: {done} of {total}, {left}.", **counts, left=left_text(left))


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
        return say("a few seconds left")
    return say("about {time} left", time=say_duration(seconds))


def lasting(stage: str, since: float, clock: float) -> str:
    """`Loading the model, for 12 s.`; without the time for a stage that has just begun."""
    seconds = elapsed(since, clock) if since else 0.0
    if seconds < PATIENCE:
        return say("{stage}.", stage=stage)
    return say("{stage}, for {time}.", stage=stage, time=say_duration(seconds))


def finished(steps: int, history: RunHistory, file: str) -> str:
    """How a run has ended that has all its steps.

    Args:
        file: what was verified: `file`, `pipeline`, or empty if it is gone.
    """
    text = say_counted(steps, "Finished: {count} step.", "Finished: {count} steps.")
    # Of a run of several sessions, the events have only the last one.
    if history.began and history.start_step == 0:
        time = clock_text(history.at - history.began)
        one = "Finished: {count} step in {time}."
        several = "Finished: {count} steps in {time}."
        text = say_counted(steps, one, several, time=time)
    if file not in VERIFIED:
        return text
    return say("{first} {second}", first=text, second=say(VERIFIED[file]))


def failed(step: int) -> str:
    """Where a run has failed; its message says why."""
    if not step:
        return say("Failed before the first step.")
    return say("Failed after step {step}.", step=f"{step:,}")
