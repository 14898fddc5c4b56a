"""The job queue of a project: commands that wait for the GPU.

The queue is stored in `queue.json`, so it survives a reboot. A thread of one server starts the next job when nothing
else runs. Every job is a separate process, which outlives the server.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import changing, write_atomically
from simpletuner.errors import UserError, full_text
from simpletuner.planning.lock import Owner, take

QUEUE_FILE = "queue.json"
SERVER_FILE = ".queue.server"  # locked by the server that starts jobs
KEPT = 12  # ended jobs
PAUSE, CHECK_SECONDS = 1.0, 10.0  # between polls of running jobs, and between checks of a waiting job's settings

Command = Literal["train", "sweep", "sample", "caption"]
WAITING, RUNNING = "waiting", "running"
Write = Callable[[Sequence["Job"]], None]


@dataclass(frozen=True)
class Job:
    """A command that is waiting, running, or has ended.

    Attributes:
        folder: the output folder of the run that the command trains, renders from or writes captions for.
        config: for `train`, the name of the config.
        settings: for `train`, settings that override the config.
        options: for other commands, the arguments besides the folder.
        state: `waiting`, `running`, or a final state as for runs.
        message: why the job cannot start, or the end of its output.
        owner: the process of the job.
    """

    id: str
    command: Command
    folder: str
    config: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)
    state: str = WAITING
    message: str = ""
    owner: Owner | None = None

    @property
    def title(self) -> str:
        """The title in lists."""
        name = Path(self.folder).name
        return name if self.command == "train" else f"{self.command} of {name}"

    @property
    def is_alive(self) -> bool:
        """Whether the process exists."""
        return self.owner is not None and self.owner.lives_here


JOBS = TypeAdapter(list[Job])


def in_state(jobs: Sequence[Job], state: str) -> list[Job]:
    """The jobs in a state, in order."""
    return [job for job in jobs if job.state == state]


class Worker(Protocol):
    """Starts and watches the processes of jobs."""

    def check(self, job: Job) -> None:
        """Raise a `UserError` if a job could not start now, even if nothing else runs."""

    def start(self, job: Job) -> Job:
        """Start the process of a job; returns it with its owner, or raises a `UserError`."""

    def look(self, job: Job) -> Job:
        """A started job with its present state and message."""

    def at_work(self) -> str:
        """The output folder of a run in progress on this machine; empty if there is none."""


class Queue:
    """The jobs of a project.

    Attributes:
        problem: why no job can be started; empty if the queue works.
    """

    def __init__(self, folder: Path, worker: Worker) -> None:
        self.file, self.worker = folder / QUEUE_FILE, worker
        self.problem = ""
        self._lock: BinaryIO | None = None
        self._problems: dict[str, tuple[float, str]] = {}  # by id of a waiting job, with the time of the check

    def read(self) -> list[Job]:
        """All jobs: ended, running, waiting.

        Raises:
            UserError: the file is damaged; it is kept.
        """
        try:
            return JOBS.validate_json(self.file.read_bytes()) if self.file.is_file() else []
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(f"{self.file} is not a valid queue ({reason}); repair or move it.") from None

    @contextmanager
    def _change(self) -> Iterator[Write]:
        """Lock the file against other servers; yields a function that writes the jobs, whose settings may be secret."""
        with changing(self.file):
            yield lambda jobs: write_atomically(self.file, JOBS.dump_json(list(jobs), indent=2), private=True)

    def add(self, command: Command, folder: str, **more: Any) -> Job:
        """Append a job."""
        job = Job(secrets.token_hex(4), command, folder, **more)
        with self._change() as write:
            write([*self.read(), job])
        return job

    def find(self, name: str) -> Job:
        """The job with an id.

        Raises:
            UserError: there is no such job.
        """
        for job in self.read():
            if job.id == name:
                return job
        raise UserError(f"There is no job {name!r} in the queue.")

    def move(self, name: str, by: int) -> None:
        """Move a waiting job by places: -1 is one earlier."""
        with self._change() as write:
            jobs = self.read()
            waiting = in_state(jobs, WAITING)
            for place, job in enumerate(waiting):
                if job.id == name:
                    waiting.insert(max(0, place + by), waiting.pop(place))
                    write([*(job for job in jobs if job.state != WAITING), *waiting])
                    return

    def again(self, name: str) -> None:
        """Requeue a job that has ended, as the next one; a run continues from its newest checkpoint."""
        with self._change() as write:
            jobs = self.read()
            for job in jobs:
                if job.id == name and job.state not in (WAITING, RUNNING):
                    settings = {key: value for key, value in job.settings.items() if key != "resume_from_checkpoint"}
                    fresh = Job(job.id, job.command, job.folder, job.config, settings, job.options)
                    begun = [other for other in jobs if other.state != WAITING and other is not job]
                    write([*begun, fresh, *in_state(jobs, WAITING)])

    def remove(self, name: str) -> None:
        """Remove a job, unless it is running."""
        with self._change() as write:
            write([job for job in self.read() if job.id != name or job.state == RUNNING])

    def step(self) -> None:
        """Update jobs that have ended, and start the next job if nothing runs."""
        with self._change() as write:
            jobs = [self.worker.look(job) if job.state == RUNNING else job for job in self.read()]
            if in_state(jobs, WAITING):
                jobs = self._start_next(jobs, write)
            ended = [job for job in jobs if job.state not in (WAITING, RUNNING)]
            jobs = [*ended[-KEPT:], *in_state(jobs, RUNNING), *in_state(jobs, WAITING)]
            # Compared with the file, not with the old list: `_start` has written a refused job as running.
            if jobs != self.read():
                write(jobs)

    def _start_next(self, jobs: list[Job], write: Write) -> list[Job]:
        """Start the first job that can start, if nothing runs; returns all jobs."""
        busy = bool(in_state(jobs, RUNNING) or self.worker.at_work())
        for place, job in enumerate(jobs):
            if job.state == WAITING:
                problem = self._problem(job)
                if busy or problem:
                    jobs[place] = replace(job, message=problem)
                    continue
                jobs[place] = self._start(job, jobs, write)
                # If it failed to start, try the next one.
                busy = jobs[place].state == RUNNING
        return jobs

    def _problem(self, job: Job) -> str:
        """Why a job cannot start; empty if it can."""
        checked, problem = self._problems.get(job.id, (-math.inf, ""))
        if time.monotonic() - checked > CHECK_SECONDS:
            try:
                self.worker.check(job)
                problem = ""
            except (UserError, OSError) as error:
                problem = str(error)
            self._problems[job.id] = time.monotonic(), problem
        return problem

    def _start(self, job: Job, jobs: Sequence[Job], write: Write) -> Job:
        """Start a job; returns it, with a message if it failed to start."""
        begun = replace(job, state=RUNNING, message="")
        # Written before the process starts: if this server is killed, no job is started twice.
        write([begun if each is job else each for each in jobs])
        try:
            return self.worker.start(begun)
        except (UserError, OSError) as error:
            self._problems[job.id] = time.monotonic(), str(error)
            return replace(job, message=str(error))

    def serve(self, over: threading.Event) -> None:
        """Start jobs until `over` is set. Only one server of a project does so; when it exits, another takes over."""
        while not over.wait(PAUSE):
            try:
                # Without a queue, no file is created in the project.
                if self.file.is_file() and self._is_server():
                    self.step()
                self.problem = ""
            except Exception as error:  # noqa: BLE001 - a damaged run must not stop the queue
                self.problem = full_text(error)
        if self._lock is not None:
            self._lock.close()

    def _is_server(self) -> bool:
        if self._lock is None:
            self._lock = take(self.file.with_name(SERVER_FILE))
        return self._lock is not None
