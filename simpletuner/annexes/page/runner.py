"""Runs the jobs of a queue, one at a time: a thread of one server starts the next when nothing else
runs.

Every job is a process of its own, which outlives the server.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from simpletuner.annexes.page.control import Runs
from simpletuner.annexes.page.project import Refusal
from simpletuner.annexes.page.queue import RUNNING, WAITING, Job, Queue, in_state
from simpletuner.annexes.runs.console import INTERRUPTED, printed, said_at_the_end
from simpletuner.annexes.runs.state import ACTIVE
from simpletuner.errors import UserError, full_text
from simpletuner.planning.lock import owner_of, take

SERVER_FILE = ".queue.server"  # locked by the server that starts jobs
PAUSE = 1.0  # seconds between polls of running jobs
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
        self._problems: dict[
            str, tuple[float, str]
        ] = {}  # by id of a waiting job, with the time of the check

    def serve(self, over: threading.Event) -> None:
        """Start jobs until `over` is set. Only one server of a project does so; when it exits,
        another takes over.
        """
        while not over.wait(PAUSE):
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
        if self._lock is None:
            self._lock = take(self.queue.file.with_name(SERVER_FILE))
        return self._lock is not None

    def step(self) -> None:
        """Update jobs that have ended, and start the first job that can start if nothing runs."""
        for job in in_state(self.queue.read(), RUNNING):
            self.queue.replace(job, self.look(job))
        jobs = self.queue.read()
        waiting = in_state(jobs, WAITING)
        is_busy = bool(waiting and (in_state(jobs, RUNNING) or self.at_work()))
        for job in waiting:
            problem = self._problem(job)
            if is_busy or problem:
                self.queue.replace(job, replace(job, message=problem))
            else:
                is_busy = self._start(job)
        self.queue.tidy()

    def _problem(self, job: Job) -> str:
        """Why a job cannot start; empty if it can."""
        checked, problem = self._problems.get(job.id, (-math.inf, ""))
        if time.monotonic() - checked > CHECK_SECONDS:
            try:
                self.check(job)
                problem = ""
            except (UserError, OSError) as error:
                problem = str(error)
            self._problems[job.id] = time.monotonic(), problem
        return problem

    def _start(self, job: Job) -> bool:
        """Start a job; returns whether it runs. One that is refused waits on, with the reason."""
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
            return replace(
                job, folder=str(run.folder), owner=owner_of(run.child.pid, "simpletuner train")
            )
        job.log.parent.mkdir(exist_ok=True)
        child = self.runs.spawn(job.log, job.arguments)
        return replace(job, owner=owner_of(child.pid, f"simpletuner {job.command}"))

    def look(self, job: Job) -> Job:
        """A started job with its present state, read from files so that it survives a restart of
        the server.
        """
        is_alive = (
            job.is_alive
        )  # read before the files, which are complete once the process has ended
        status = self.runs.at(Path(job.folder)).status() if job.command == "train" else {}
        if is_alive or status.get("status") in ACTIVE:
            # The view of a run shows its message.
            return replace(job, message="" if status else said_at_the_end(printed(job.log)))
        if job.owner is None:
            return replace(
                job,
                state="interrupted",
                message="The server exited while it was starting this job.",
            )
        if status:
            return replace(job, state=status["status"], message=status["message"])
        return _ended(job)

    def at_work(self) -> str:
        """The output folder of a run in progress on this machine; empty if there is none."""
        for run in self.runs.all():
            if run.pid is not None:
                return str(run.folder)
        return ""


def _ended(job: Job) -> Job:
    """A command other than `train` whose process has ended; its last line says how."""
    output = printed(job.log)
    last = said_at_the_end(output)
    if last.startswith(DONE):
        return replace(job, state="completed", message=last)
    if last in INTERRUPTED:
        return replace(job, state="cancelled", message=last)
    errors = said_at_the_end(output, only_errors=True)
    return replace(
        job, state="error", message=errors or f"Ended unexpectedly. Its last line: {last.strip()}"
    )
