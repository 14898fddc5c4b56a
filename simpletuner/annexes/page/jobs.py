"""The queue on the page: adding, moving, removing and showing its jobs."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.page.control import ask, send
from simpletuner.annexes.page.live import runs_of, training_in
from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.project import Refusal, checked_value, project_of
from simpletuner.annexes.page.queue import RUNNING, Job, Queue
from simpletuner.annexes.page.runner import Runner
from simpletuner.annexes.report import html
from simpletuner.annexes.runs.console import PROMPT, output_end
from simpletuner.errors import Problem, UserError

# Options of the commands that render from a run, besides prompts and pictures.
OPTIONS = {
    "sweep": ("strengths", "checkpoints"),
    "sample": ("strength", "checkpoint", "seed", "resolution"),
}


def queue_of(request: Request) -> Queue:
    """The queue of the project."""
    return request.app.state.runner.queue


def add(request: Request, body: dict[str, Any]) -> Response:
    """Queue a training: `{"config": NAME, "settings": {...}}`, or `"run": ID` for a config."""
    config, settings = training_in(request, body)
    run = runs_of(request).started_by(config, settings)
    job = queue_of(request).add("train", str(run.folder), config=config, settings=settings)
    return JSONResponse({"job": job.id, "run": run.id}, 202)


def add_rendering(request: Request, body: dict[str, Any]) -> Response:
    """Queue a sweep or a sample of a run.

    The body is `{"run": ID, "command": "sample", "prompts": [...], "strength": "0,1"}`.
    """
    run = runs_of(request).find(str(body.get("run", "")))
    command = body.get("command")
    if command not in OPTIONS or not run.may_start:
        raise Refusal(
            400, "A job must be a sweep or a sample of a run that `simpletuner server` shows."
        )
    options = []
    for prompt in checked_value({"prompts": [], **body}, "prompts", list):
        text = str(prompt).strip()
        if text:
            options.append(f"--prompt={text}")
    image = str(body.get("image") or "")
    if image:
        options.append(f"--image={project_of(request).inside(image)}")
    # The command checks the other options; the page shows its output.
    for key in OPTIONS[command]:
        text = str(body.get(key) or "").strip()
        if text:
            options.append(f"--{key}={text}")
    job = queue_of(request).add(command, str(run.folder), options=options)
    return JSONResponse({"job": job.id, "run": run.id}, 202)


def move(request: Request, body: dict[str, Any]) -> Response:
    """Move a waiting job: `{"job": ID, "by": -1}` is one place earlier."""
    by = body.get("by")
    if not isinstance(by, int):
        raise Refusal(400, [Problem("by", "must be a whole number.")])
    queue_of(request).move(str(body.get("job")), by)
    return JSONResponse({})


def requeue(request: Request, body: dict[str, Any]) -> Response:
    """Requeue an interrupted or failed job, as the next one: `{"job": ID}`."""
    queue_of(request).requeue(str(body.get("job")))
    return JSONResponse({})


def remove(request: Request, body: dict[str, Any]) -> Response:
    """Remove a job from the queue, or stop a running one as Ctrl-C does: `{"job": ID}`."""
    job = queue_of(request).find(str(body.get("job")))
    if job.state != RUNNING:
        queue_of(request).remove(job.id)
    elif job.command == "train":
        ask(runs_of(request).at(Path(job.folder)), "stop")
    elif job.owner is not None and job.is_alive:
        send(job.owner.pid, signal.SIGINT)
    return JSONResponse({})


def show_queue(request: Request) -> Response:
    """The queue as HTML."""
    if runs_of(request).project.run is not None:
        return HTMLResponse("")  # the page of a run cannot start jobs
    template = "page/queue.html.jinja"
    runner = request.app.state.runner
    return HTMLResponse(draw_part("Queue", lambda: html.render(template, **queue_content(runner))))


def queue_content(runner: Runner) -> dict[str, Any]:
    """Template values for the queue."""
    jobs: list[Job] = []
    problem = runner.problem
    try:
        jobs = runner.queue.read()
    except (UserError, OSError) as error:
        problem = str(error)
    running = [job.title for job in jobs if job.state == RUNNING]
    if running:
        busy = running[0]
    else:
        busy = Path(runner.busy_folder()).name
    # Commands append to the same file: only the newest one's output is shown.
    newest = {job.log: job.id for job in jobs if job.command != "train"}
    rows = []
    for job in jobs:
        log = ""
        if newest.get(job.log) == job.id:
            log = output_end(job.log).rpartition(PROMPT)[2]
        run = runner.runs.at(Path(job.folder))
        rows.append({"job": job, "run": run.id, "log": log})
    return {"rows": rows, "problem": problem, "busy": busy}
