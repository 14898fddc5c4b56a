"""The head of a run's page: what runs now, its buttons, its figures, and what is folded below."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from simpletuner.annexes.figures import Columns, course_of_loss, evaluation_points, is_number
from simpletuner.annexes.fitting.ready import CONSENT
from simpletuner.annexes.languages.say import say, say_counted
from simpletuner.annexes.page.runs.control import CONSENT_ON_PAGE
from simpletuner.annexes.report.html import hours_of
from simpletuner.annexes.runs.history import STOPS_LATER, StageTurn
from simpletuner.annexes.runs.log_files import record_in
from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.runs.sentence import stage_name
from simpletuner.annexes.runs.state import ACTIVE, saved_step
from simpletuner.errors import UserError
from simpletuner.planning.checkpoint_folder import find_checkpoints
from simpletuner.reporting.metrics import REPORT_FILE
from simpletuner.reporting.step_figures import FIGURES
from simpletuner.reporting.wording import clock_text, size_text
from simpletuner.weights.lora_names import LORA_FILE


def head(run: Run) -> dict[str, Any]:
    """Template values for the head of a run."""
    status = run.status()
    facts: list[tuple[str, str]] = []
    columns = Columns()
    damage = ""
    with suppress(OSError, UserError):  # reported by the status
        columns, damage = record_in(run.folder).read()
    if status["status"] in ACTIVE:
        facts = list(live_figures(status["progress"], columns))
    elif columns.steps:
        facts = list(final_figures(run, columns))
    reason = reason_of(status)
    if damage not in reason:
        reason = f"{reason}\n{damage}".strip()
    return {
        "status": status,
        "is_active": status["status"] in ACTIVE,
        "facts": facts,
        "bar": bar_of(run, status),
        "reason": reason,
        "answers": answers_of(run),
        "loss": loss_of(run, status) if status["can"]["cancel"] else "",
        "is_without_config": is_without_config(run, status),
        "has_report": (run.folder / REPORT_FILE).is_file(),
    }


def is_without_config(run: Run, status: Mapping[str, Any]) -> bool:
    """Whether an unfinished run cannot go on here, since no config writes to its folder."""
    has_ended = status["status"] not in (*ACTIVE, "idle", "completed")
    return has_ended and run.may_start and not run.config


def bar_of(run: Run, status: Mapping[str, Any]) -> tuple[int, int] | None:
    """What the bar shows, as (done, total): a stage before training, then the steps."""
    progress = status["progress"]
    if status["status"] == "starting":
        with suppress(OSError, UserError):
            now = run.now("starting", run.judge().history, progress)
            return (now.done, now.total) if now.total else None
    if not progress["total"] or status["status"] == "completed":
        return None
    return progress["current"], progress["total"]


def answers_of(run: Run) -> list[str]:
    """The newest answer to a request that takes longer than a step."""
    with suppress(OSError, UserError):
        notices = run.judge().history.notices
        return [text for text in notices if text.startswith(STOPS_LATER)][-1:]
    return []


def reason_of(status: Mapping[str, Any]) -> str:
    """Why a run failed or is damaged, or makes no progress, in the words of the page."""
    if status["status"] in ACTIVE:
        return str(status["notice"])
    if status["status"] not in ("error", "broken"):
        return ""
    return in_page_words(str(status["message"]))


def in_page_words(text: str) -> str:
    """A message in which advice for a terminal is replaced by what the page has instead."""
    return text.replace(CONSENT, say(CONSENT_ON_PAGE))


def loss_of(run: Run, status: Mapping[str, Any]) -> str:
    """What is lost if an active run is cancelled now.

    A run whose steps are short stops after one, which saves all of them.
    """
    step = status["progress"]["current"]
    saved = saved_step(run)
    lost = step - saved
    if status["status"] == "starting":
        return say("Nothing is lost: no step has been trained since it was started.")
    if lost <= 0 and saved:
        return say("Nothing is lost: step {step} is saved.", step=f"{saved:,}")
    if lost <= 0:
        return say("No step has been trained yet.")
    since = f"checkpoint-{saved}" if saved else say("the start")
    one = "The one step since {since} may be lost."
    several = "The {count} steps since {since} may be lost."
    return say_counted(lost, one, several, since=since)


def live_figures(progress: Mapping[str, Any], columns: Columns) -> Iterator[tuple[str, str]]:
    """Key figures of an active run, as (name, text)."""
    for figure in FIGURES:
        value = progress["metrics"].get(figure.live_name)
        if figure.title and is_number(value):
            yield figure.title, figure.text(value)
    yield from time_in_steps(columns)


def final_figures(run: Run, columns: Columns) -> Iterator[tuple[str, str]]:
    """Key figures of a run that has ended, as (name, text)."""
    yield from course_of_loss(columns)
    measured = evaluation_points(columns)
    if measured:
        step, best = min(measured, key=lambda point: point[1])
        text = say("{loss} at step {step}", loss=f"{best:.4g}", step=f"{step:,}")
        yield "Lowest held-out loss", text
    yield from time_in_steps(columns)
    files = list(files_of(run))
    if files:
        yield "Files", ", ".join(files)


def time_in_steps(columns: Columns) -> Iterator[tuple[str, str]]:
    """The time spent in steps, of all sessions."""
    hours = hours_of(columns)
    if hours:
        _step, total_hours = hours[-1]
        yield "Time in steps", clock_text(total_hours * 3600)


def files_of(run: Run) -> Iterator[str]:
    """The weights of a run, in words."""
    lora = run.folder / LORA_FILE
    if lora.is_file():
        yield say("LoRA of {size}", size=size_text(lora.stat().st_size))
    checkpoints, _incomplete = find_checkpoints(run.folder)
    if checkpoints:
        yield say_counted(len(checkpoints), "1 checkpoint", "{count} checkpoints")


def rest(run: Run) -> dict[str, Any]:
    """Template values for what is folded at the end: notices, stages and messages."""
    status = run.status()
    notices: list[str] = []
    turns: list[StageTurn] = []
    with suppress(OSError, UserError):  # reported by the status
        history = run.judge().history
        turns = history.turns
        notices = history.notices
    shown = (status["sentence"], reason_of(status))
    message = "" if status["message"] in shown else status["message"]
    return {
        "turns": turns,
        "name_of": stage_name,
        "is_active": status["status"] in ACTIVE,
        "notices": notices,
        "message": message,
    }
