"""The queue on the page: adding, moving, removing and showing its jobs."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.project import Refusal, checked_value, project_of, read_object
from simpletuner.annexes.page.runs import control
from simpletuner.annexes.page.runs.control import ask, send
from simpletuner.annexes.page.runs.live import runs_of, training_in
from simpletuner.annexes.page.runs.queue import RUNNING, WAITING, Job, Queue
from simpletuner.annexes.page.runs.runner import Runner
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


async def add(request: Request) -> Response:
    """Queue a training: `{"config": NAME, "settings": {...}}`, or `"run": ID` for a config.

    What the run's plan would refuse is refused at once: nobody may be there when its turn comes.
    """
    body = await read_object(request)
    config, settings = await run_in_threadpool(training_in, request, body)
    run = await run_in_threadpool(runs_of(request).started_by, config, settings)
    queue = queue_of(request)
    if not await run_in_threadpool(waits_for_captions, queue, str(run.folder)):
        await check_plan(request, config, settings)
    job = await run_in_threadpool(
        partial(queue.add, "train", str(run.folder), config=config, settings=settings)
    )
    return JSONResponse({"job": job.id, "run": run.id}, 202)


def waits_for_captions(queue: Queue, folder: str) -> bool:
    """Whether the queue first writes captions for a run, without which its plan may be refused."""
    for job in queue.read():
        if job.command == "caption" and job.folder == folder and job.state in (WAITING, RUNNING):
            return True
    return False


async def check_plan(request: Request, config: str, settings: dict[str, Any]) -> None:
    """Check that `train` would not refuse a run.

    Raises:
        Refusal: 422 with the problems of its plan.
    """
    arguments, _secrets = runs_of(request).arguments(config, settings)
    command = [*control.PROGRAM, "plan", "--json", "--cached", *arguments]
    folder = project_of(request).folder
    output, messages = await control.run_while_wanted(request, command, folder)
    document = control.document_in(output, messages, str(folder))
    refusals = [
        Problem(problem["key"], problem["message"])
        for problem in document["problems"]
        if would_refuse(problem)
    ]
    if refusals:
        raise Refusal(422, refusals)


def would_refuse(problem: Mapping[str, Any]) -> bool:
    """Whether `train` refuses a run with this problem of its plan."""
    if problem["fatal"]:
        # Files that are not downloaded yet are downloaded by the run.
        return problem.get("kind") != "unfetched"
    # Days on a CPU need consent, unless there is a GPU that only torch can see.
    return problem.get("kind") == "consent" and not sees_gpu_files()


def sees_gpu_files() -> bool:
    """Whether there is a GPU, also in a container without the tools that describe it."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


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
    """Move a waiting job: `{"job": ID, "by": -1}` is one place earlier.

    Raises:
        Refusal: 400 without a number, 404 if no such job waits.
    """
    by = body.get("by")
    if not isinstance(by, int):
        raise Refusal(400, [Problem("by", "must be a whole number.")])
    name = str(body.get("job"))
    if not queue_of(request).move(name, by):
        raise Refusal(404, f"No job {name!r} waits in the queue.")
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
    template = "page/runs/queue.html.jinja"
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
