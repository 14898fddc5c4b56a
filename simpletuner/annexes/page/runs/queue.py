"""The queue of a project: the list of its jobs in `queue.json`, which survives a reboot."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from simpletuner.annexes.report.samples import SAMPLES_FOLDER
from simpletuner.annexes.runs.console import CONSOLE_FILE
from simpletuner.atomic import locked_for_change, write_atomically
from simpletuner.errors import UserError
from simpletuner.planning.checkpoint_folder import SWEEP_FOLDER
from simpletuner.planning.lock import Owner

QUEUE_FILE = "queue.json"
KEPT = 12  # ended jobs
WAITING = "waiting"
RUNNING = "running"

Command = Literal["train", "sweep", "sample", "caption"]
# The output of a command, in the folder of its run. Sweeps and samples are rendered into the same
# folder.
LOGS: dict[Command, str] = {
    "train": CONSOLE_FILE,
    "sweep": f"{SWEEP_FOLDER}/job.log",
    "sample": f"{SAMPLES_FOLDER}/job.log",
    "caption": "caption.log",
}


@dataclass(frozen=True)
class Job:
    """A command that is waiting, running, or has ended.

    Attributes:
        folder: the output folder of the run that the command trains, renders from or writes
            captions for.
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
    def log(self) -> Path:
        """The file with the output of the command."""
        return Path(self.folder, LOGS[self.command])

    @property
    def arguments(self) -> list[str]:
        """The command line of a command other than `train`."""
        if self.command == "caption":
            return [self.command, *self.options]
        return [self.command, self.folder, f"--output={self.log.parent}", *self.options]

    @property
    def is_alive(self) -> bool:
        """Whether the process exists."""
        return self.owner is not None and self.owner.lives_here

    def requeued(self) -> Job:
        """The same job, waiting again; a run continues from its newest checkpoint."""
        settings = {
            key: value for key, value in self.settings.items() if key != "resume_from_checkpoint"
        }
        return Job(self.id, self.command, self.folder, self.config, settings, self.options)


JOBS = TypeAdapter(list[Job])


def in_state(jobs: Sequence[Job], state: str) -> list[Job]:
    """The jobs in a state, in order."""
    return [job for job in jobs if job.state == state]


def started_jobs(jobs: Sequence[Job]) -> list[Job]:
    """The jobs that do not wait: the last ended ones, then the running ones."""
    ended = [job for job in jobs if job.state not in (WAITING, RUNNING)]
    return [*ended[-KEPT:], *in_state(jobs, RUNNING)]


class Queue:
    """The list of jobs in a file, which servers on the same project share."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / QUEUE_FILE

    def read(self) -> list[Job]:
        """All jobs: ended, running, waiting.

        Raises:
            UserError: the file is damaged; it is kept.
        """
        if not self.file.is_file():
            return []
        try:
            return JOBS.validate_json(self.file.read_bytes())
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise UserError(
                f"{self.file} is not a valid queue ({reason}); repair or move it."
            ) from None

    @contextmanager
    def _changing(self) -> Iterator[list[Job]]:
        """Lock the file against other servers; a changed list is written at the end."""
        with locked_for_change(self.file):
            before = self.read()
            jobs = list(before)
            yield jobs
            if jobs != before:
                # Private, since settings may be secret.
                write_atomically(self.file, JOBS.dump_json(jobs, indent=2), private=True)

    def add(self, command: Command, folder: str, **more: Any) -> Job:
        """Append a job."""
        job = Job(secrets.token_hex(4), command, folder, **more)
        with self._changing() as jobs:
            jobs.append(job)
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

    def move(self, name: str, by: int) -> bool:
        """Move a waiting job by places: -1 is one earlier. False if no such job waits."""
        with self._changing() as jobs:
            waiting = in_state(jobs, WAITING)
            for place, job in enumerate(waiting):
                if job.id == name:
                    waiting.pop(place)
                    waiting.insert(max(0, place + by), job)
                    jobs[:] = [*started_jobs(jobs), *waiting]
                    return True
        return False

    def requeue(self, name: str) -> None:
        """Requeue a job that has ended, as the next one."""
        with self._changing() as jobs:
            for job in list(jobs):
                if job.id == name and job.state not in (WAITING, RUNNING):
                    jobs.remove(job)
                    jobs[:] = [*started_jobs(jobs), job.requeued(), *in_state(jobs, WAITING)]

    def remove(self, name: str) -> None:
        """Remove a job, unless it is running."""
        with self._changing() as jobs:
            jobs[:] = [job for job in jobs if job.id != name or job.state == RUNNING]

    def drop_ended(self, folder: str) -> None:
        """Remove the ended jobs of an output folder that is no longer there."""
        if not self.file.is_file():
            return
        with self._changing() as jobs:
            at_work = (WAITING, RUNNING)
            jobs[:] = [job for job in jobs if job.folder != folder or job.state in at_work]

    def replace(self, job: Job, new: Job) -> bool:
        """Replace a job; False if it has been changed or removed meanwhile."""
        with self._changing() as jobs:
            if job not in jobs:
                return False
            jobs[jobs.index(job)] = new
            return True

    def tidy(self) -> None:
        """Sort the jobs: ended, running, waiting; only the last `KEPT` ended jobs are kept."""
        with self._changing() as jobs:
            jobs[:] = [*started_jobs(jobs), *in_state(jobs, WAITING)]
