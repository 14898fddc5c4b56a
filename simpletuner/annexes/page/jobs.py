"""The queue on the page: starting and monitoring its jobs, and adding, moving and removing them."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.page.control import Runs, ask, send
from simpletuner.annexes.page.live import asked_for, runs_of
from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.project import Refusal, project_of, wanted
from simpletuner.annexes.page.results import SAMPLES_FOLDER
from simpletuner.annexes.queue import RUNNING, Job, Queue
from simpletuner.annexes.report import html
from simpletuner.annexes.report.sheet import SWEEP_FOLDER
from simpletuner.annexes.runs import ACTIVE, CONSOLE_FILE, INTERRUPTED, PROMPT, printed, said_at_the_end
from simpletuner.errors import Problem, UserError
from simpletuner.planning.lock import owner_of

# Folders of jobs in the run's output folder.
FOLDERS = {"sweep": SWEEP_FOLDER, "sample": SAMPLES_FOLDER, "caption": ""}
LOGS = {"train": CONSOLE_FILE, "sweep": "job.log", "sample": "job.log", "caption": "caption.log"}
# Prefixes of the last line of commands other than `train` that succeeded.
DONE = ("Saved ", "Captions written: ", "Every picture and clip has a caption")
OPTIONS = {"sweep": ("strengths", "checkpoints"), "sample": ("strength", "checkpoint", "seed", "resolution")}


class RunWorker:
    """Starts the jobs of the queue as processes, and reports their state."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def check(self, job: Job) -> None:
        """Raise the reason why a job cannot start, if any."""
        if job.command == "train":
            self.runs.started_by(job.config, job.settings)
        elif not Path(job.folder).is_dir():
            raise Refusal(404, f"The folder {job.folder} does not exist.")

    def start(self, job: Job) -> Job:
        """Start the process of a job."""
        if job.command == "train":
            run = self.runs.start(job.config, job.settings)
            assert run.child is not None
            return replace(job, folder=str(run.folder), owner=owner_of(run.child.pid, "simpletuner train"))
        log = log_of(job)
        log.parent.mkdir(exist_ok=True)
        folders = [] if job.command == "caption" else [job.folder, f"--output={log.parent}"]
        child = self.runs.spawn(log, [job.command, *folders, *job.options])
        return replace(job, owner=owner_of(child.pid, f"simpletuner {job.command}"))

    def look(self, job: Job) -> Job:
        """The present state of a started job, read from files so that it survives a restart of the server."""
        is_alive = job.is_alive  # read before the files, which are complete once the process has ended
        status = self.runs.at(Path(job.folder)).status() if job.command == "train" else {}
        if is_alive or status.get("status") in ACTIVE:
            # The view of a run shows its message.
            return replace(job, message="" if status else said_at_the_end(printed(log_of(job))))
        if job.owner is None:
            return replace(job, state="interrupted", message="The server exited while it was starting this job.")
        if status:
            return replace(job, state=status["status"], message=status["message"])
        output = printed(log_of(job))
        last, errors = said_at_the_end(output), said_at_the_end(output, only_errors=True)
        if last.startswith(DONE) or last in INTERRUPTED:
            return replace(job, state="completed" if last.startswith(DONE) else "cancelled", message=last)
        return replace(job, state="error", message=errors or f"Ended unexpectedly. Its last line: {last.strip()}")

    def at_work(self) -> str:
        """The folder of a run in progress on this machine."""
        return next((str(run.folder) for run in self.runs.all() if run.pid is not None), "")


def log_of(job: Job) -> Path:
    """The file with the output of a job."""
    return Path(job.folder, FOLDERS.get(job.command, ""), LOGS[job.command])


def queue_of(request: Request) -> Queue:
    """The queue of the project."""
    return request.app.state.queue


def add(request: Request, body: dict[str, Any]) -> Response:
    """Queue a training: `{"run": ID, "settings": {...}}` or `{"config": NAME, "settings": {...}}`."""
    config, settings = asked_for(request, body)
    run = runs_of(request).started_by(config, settings)
    job = queue_of(request).add("train", str(run.folder), config=config, settings=settings)
    return JSONResponse({"job": job.id, "run": run.id}, 202)


def add_rendering(request: Request, body: dict[str, Any]) -> Response:
    """Queue a sweep or a sample: `{"run": ID, "command": "sample", "prompts": [...], "strength": "0,1"}`."""
    run, command = runs_of(request).find(str(body.get("run", ""))), body.get("command")
    if command not in OPTIONS or not run.may_start:
        raise Refusal(400, "A job must be a sweep or a sample of a run that `simpletuner server` shows.")
    prompts = [text for each in wanted({"prompts": [], **body}, "prompts", list) if (text := str(each).strip())]
    options = [f"--prompt={text}" for text in prompts]
    if image := str(body.get("image") or ""):
        options.append(f"--image={project_of(request).inside(image)}")
    # The command checks the other options; the page shows its output.
    options += [f"--{key}={text}" for key in OPTIONS[command] if (text := str(body.get(key) or "").strip())]
    job = queue_of(request).add(command, str(run.folder), options=options)
    return JSONResponse({"job": job.id, "run": run.id}, 202)


def move(request: Request, body: dict[str, Any]) -> Response:
    """Move a waiting job: `{"job": ID, "by": -1}` is one place earlier."""
    by = body.get("by")
    if not isinstance(by, int):
        raise Refusal(400, [Problem("by", "must be a whole number.")])
    queue_of(request).move(str(body.get("job")), by)
    return JSONResponse({})


def again(request: Request, body: dict[str, Any]) -> Response:
    """Requeue an interrupted or failed job, as the next one: `{"job": ID}`."""
    queue_of(request).again(str(body.get("job")))
    return JSONResponse({})


def remove(request: Request, body: dict[str, Any]) -> Response:
    """Remove a job from the queue: `{"job": ID}`; a running job is stopped instead, as by Ctrl-C."""
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
    queue, runs = queue_of(request), runs_of(request)
    if runs.project.run is not None:
        return HTMLResponse("")  # the page of a run cannot start jobs
    template = "page/queue.html.jinja"
    return HTMLResponse(draw_part("Queue", lambda: html.render(template, **queue_content(queue, runs))))


def queue_content(queue: Queue, runs: Runs) -> dict[str, Any]:
    """Template values for the queue."""
    jobs, problem = list[Job](), queue.problem
    try:
        jobs = queue.read()
    except (UserError, OSError) as error:
        problem = str(error)
    running = [job.title for job in jobs if job.state == RUNNING]
    busy = running[0] if running else Path(queue.worker.at_work()).name
    newest = {log_of(job): job.id for job in jobs if job.command != "train"}
    rows = [
        {
            "job": job,
            "run": runs.at(Path(job.folder)).id,
            "log": printed(log_of(job)).rpartition(PROMPT)[2] if newest.get(log_of(job)) == job.id else "",
        }
        for job in jobs
    ]
    return {"rows": rows, "problem": problem, "busy": busy}
