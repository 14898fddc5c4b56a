"""What a run that has not started would do: the verdict of its plan, its data and its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.project import chosen_by, project_of
from simpletuner.annexes.page.runs.control import PROGRAM, document_in, run_while_wanted
from simpletuner.annexes.page.runs.live import chosen
from simpletuner.annexes.page.runs.run_head import in_page_words
from simpletuner.annexes.report import html
from simpletuner.annexes.runs.run import Run
from simpletuner.errors import counted
from simpletuner.models.registry import FAMILIES
from simpletuner.reporting.wording import about_text, size_text

Document = Mapping[str, Any]


async def show_planned(request: Request) -> Response:
    """The plan of a run that has not started; empty for all others."""
    run = await run_in_threadpool(chosen, request)
    status = await run_in_threadpool(run.status)
    if status["status"] != "idle" or not run.config:
        return HTMLResponse("")
    project = project_of(request)
    file = project.config_file(run.config)
    # Only files that are here: looking at a run downloads nothing.
    command = [*PROGRAM, "plan", "--json", "--cached", chosen_by(run.config, file)]
    output, messages = await run_while_wanted(request, command, project.folder)
    document = document_in(output, messages, str(project.folder))
    return HTMLResponse(await run_in_threadpool(draw_plan, run, document))


def draw_plan(run: Run, document: Document) -> str:
    """The outline of a plan as HTML."""

    def draw() -> str:
        return html.render("page/runs/planned.html.jinja", run=run, **outline(document))

    return draw_part("Plan", draw)


def outline(document: Document) -> dict[str, Any]:
    """Template values for the document of `simpletuner plan --json`."""
    problems = document["problems"]
    fatal = [problem for problem in problems if problem["fatal"]]
    lines: list[str] = []
    verdict = f"cannot start: {counted(len(fatal), 'problem')}"
    if document.get("device"):
        lines = list(plan_lines(document))
        verdict = verdict if fatal else "fits"
    shown = fatal or [problem for problem in problems if problem["key"] == "device"]
    return {
        "verdict": verdict,
        "is_good": not fatal,
        "lines": lines,
        "problems": [in_page_words(problem_text(problem)) for problem in shown],
    }


def problem_text(problem: Mapping[str, Any]) -> str:
    """A problem with its key."""
    if problem["key"] in ("", "device", "memory", "disk"):
        return str(problem["message"])
    return f"{problem['key']}: {problem['message']}"


def plan_lines(document: Document) -> Iterator[str]:
    """What a plan trains, on which files, for how long and with how much memory."""
    model = document["model"]
    kind = "LoRA" if model["type"] == "lora" else "Full fine-tune"
    yield f"{kind} on {FAMILIES[model['family']].title} {model['flavour']}"
    for dataset in document["datasets"]:
        if dataset["trained"]:
            yield f"{dataset['id']}: {dataset['used']:,} of {counted(dataset['files'], 'file')}"
    seconds = document["seconds"]
    time = f"{counted(document['length']['steps'], 'step')}, about {about_text(seconds['total'])}"
    if seconds["previews"]:
        time += f", of which previews {about_text(seconds['previews'])}"
    yield time
    device = document["device"]
    peak = max(phase["device"] for phase in document["memory"])
    memory = f"up to {size_text(round(peak))}"
    if device["usable"] is not None:
        memory += f" of {size_text(round(device['usable']))}"
    yield f"{memory} of memory on {device['name']}"
    if model["download"]:
        yield f"{size_text(round(model['download']))} to download first"
