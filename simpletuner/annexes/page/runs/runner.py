"""Runs the jobs of a queue, one at a time, from a thread of the server.

Every job is a process of its own, which outlives the server.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from simpletuner.annexes.page.project import Refusal
from simpletuner.annexes.page.runs.control import Runs
from simpletuner.annexes.page.runs.queue import RUNNING, WAITING, Job, Queue, in_state
from simpletuner.annexes.runs.console import INTERRUPTED, last_message, output_end
from simpletuner.annexes.runs.state import ACTIVE
from simpletuner.errors import UserError, full_text
from simpletuner.planning.lock import owner_of, take

SERVER_FILE = ".queue.server"  # locked by the server that starts jobs
POLL_SECONDS = 1.0  # between looks at running jobs
CHECK_SECONDS = 10.0  # between checks of a waiting job's settings
# Prefixes of the last line of commands other than `train` that succeeded.
DONE = ("Saved ", "Captions written: ", "Every picture and clip has a caption")


class Runner:
    """Starts and follows the jobs of a queue.

    Attributes:
        problem: why no job can be started; empty if the queue works.
    """

    def __init__(self, queue: Queue, runs: Runs) -> None:
        self.queue = queue
        self.runs = runs
        self.problem = ""
        self._lock: BinaryIO | None = None
        # By the id of a waiting job: the time of its last check, and what it found.
        self._problems: dict[str, tuple[float, str]] = {}

    def serve(self, over: threading.Event) -> None:
        """Start jobs until `over` is set.

        Only one server of a project does so; when it exits, another takes over.
        """
        while not over.wait(POLL_SECONDS):
            try:
                # Without a queue, no file is created in the project.
                if self.queue.file.is_file() and self._is_server():
                    self.step()
                self.problem = ""
            except Exception as error:  # noqa: BLE001 - a damaged run must not stop the queue
                self.problem = full_text(error)
        if self._lock is not None:
            self._lock.close()

    def _is_server(self) -> bool:
        """Whether this server starts the jobs; it does once it holds the lock."""
        if self._lock is None:
            self._lock = take(self.queue.file.with_name(SERVER_FILE))
        return self._lock is not None

    def step(self) -> None:
        """Update jobs that have ended, and start the first job that can start if nothing runs."""
        for job in in_state(self.queue.read(), RUNNING):
            self.queue.replace(job, self.updated(job))
        jobs = self.queue.read()
        waiting = in_state(jobs, WAITING)
        # The search for a run takes a while, so it is left out if no job waits.
        is_busy = bool(waiting and (in_state(jobs, RUNNING) or self.busy_folder()))
        for job in waiting:
            problem = self._problem(job)
            if is_busy or problem:
                self.queue.replace(job, replace(job, message=problem))
            else:
                is_busy = self._start(job)
        self.queue.tidy()

    def _problem(self, job: Job) -> str:
        """Why a job cannot start; empty if it can."""
        checked_at, problem = self._problems.get(job.id, (-math.inf, ""))
        if time.monotonic() - checked_at <= CHECK_SECONDS:
            return problem
        try:
            self.check(job)
            problem = ""
        except (UserError, OSError) as error:
            problem = str(error)
        self._problems[job.id] = time.monotonic(), problem
        return problem

    def _start(self, job: Job) -> bool:
        """Start a job; returns whether it runs. A refused job waits on, with the reason."""
        running = replace(job, state=RUNNING, message="")
        # Written before the process starts: if this server is killed, no job is started twice.
        if not self.queue.replace(job, running):
            return False
        try:
            started = self.spawn(running)
        except (UserError, OSError) as error:
            self._problems[job.id] = time.monotonic(), str(error)
            self.queue.replace(running, replace(job, message=str(error)))
            return False
        self.queue.replace(running, started)
        return True

    def check(self, job: Job) -> None:
        """Raise a `UserError` if a job could not start now, even if nothing else runs."""
        if job.command == "train":
            self.runs.started_by(job.config, job.settings)
        elif not Path(job.folder).is_dir():
            raise Refusal(404, f"The folder {job.folder} does not exist.")

    def spawn(self, job: Job) -> Job:
        """Start the process of a job; returns the job with its owner, or raises a `UserError`."""
        if job.command == "train":
            run = self.runs.start(job.config, job.settings)
            assert run.child is not None
            owner = owner_of(run.child.pid, "simpletuner train")
            return replace(job, folder=str(run.folder), owner=owner)
        job.log.parent.mkdir(exist_ok=True)
        child = self.runs.spawn(job.log, job.arguments)
        return replace(job, owner=owner_of(child.pid, f"simpletuner {job.command}"))

    def updated(self, job: Job) -> Job:
        """A started job with its present state, which also another server can read from files."""
        # Read before the files, which are complete once the process has ended.
        is_alive = job.is_alive
        status: dict[str, Any] = {}
        if job.command == "train":
            status = self.runs.at(Path(job.folder)).status()
        if is_alive or status.get("status") in ACTIVE:
            # The view of a run shows its message.
            message = "" if status else last_message(output_end(job.log))
            return replace(job, message=message)
        if job.owner is None:
            message = "The server exited while it was starting this job."
            return replace(job, state="interrupted", message=message)
        if status:
            return replace(job, state=status["status"], message=status["message"])
        return _ended(job)

    def busy_folder(self) -> str:
        """The output folder of a run in progress on this machine; empty if there is none."""
        for run in self.runs.all():
            if run.pid is not None:
                return str(run.folder)
        return ""


def _ended(job: Job) -> Job:
    """A command other than `train` whose process has ended, as its last line reports it."""
    output = output_end(job.log)
    last = last_message(output)
    if last.startswith(DONE):
        return replace(job, state="completed", message=last)
    if last in INTERRUPTED:
        return replace(job, state="cancelled", message=last)
    errors = last_message(output, only_errors=True)
    message = errors or f"Ended unexpectedly. Its last line: {last.strip()}"
    return replace(job, state="error", message=message)
