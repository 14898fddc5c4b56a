"""The sentence on what to do next with a run, and its button."""

from __future__ import annotations

from typing import Any

from simpletuner.annexes.advice.next_step import NextStep
from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.report import html
from simpletuner.annexes.runs.next_step import next_step_of
from simpletuner.annexes.runs.run import Run
from simpletuner.weights.lora_names import LORA_FILE


def advice_part(run: Run) -> str:
    """What to do next with a run, as HTML; empty where its record does not decide."""

    def draw() -> str:
        return html.render("page/runs/advice.html.jinja", run=run, **values_of(run))

    return draw_part("What to do next", draw)


def is_in_head(step: NextStep) -> bool:
    """Whether the head of the run's page says it already, and has its button."""
    return step.kind == "continue" and not step.settings


def values_of(run: Run) -> dict[str, Any]:
    """Template values: the sentence, and which of its buttons work."""
    step = next_step_of(run)
    if step is None or is_in_head(step):
        return {"next": None}
    status = run.status()
    file = run.folder / f"checkpoint-{step.step}" / LORA_FILE
    return {
        "next": step,
        "has_file": step.kind == "take" and file.is_file(),
        "may_continue": step.kind == "continue" and status["can"]["continue"],
        "total": status["progress"]["total"],
        "config": run.config if run.may_start else "",
    }
