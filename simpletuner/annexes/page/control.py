"""The processes that the page starts. Runs outlive the server, which finds, stops and continues
them; plans and dataset pages are killed when their client disconnects.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.page import project as served
from simpletuner.annexes.page.files import Configuration
from simpletuner.annexes.page.project import Project, Refusal, project_of, read_object
from simpletuner.annexes.payloads import EVENTS_FILE, last_id
from simpletuner.annexes.runs.console import CONSOLE_FILE, PROMPT
from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.runs.state import ACTIVE
from simpletuner.atomic import write_json
from simpletuner.config.load import canonical
from simpletuner.config.records import without_removed
from simpletuner.config.schema import all_options
from simpletuner.config.sources import (
    DATASET_FILE,
    ENV_VARIABLES,
    SECRET_SETTINGS,
    example_names,
    is_secret,
    read_config_file,
)
from simpletuner.distributed import requests
from simpletuner.errors import Problems, UserError, did_you_mean
from simpletuner.hashing import hash_bytes
from simpletuner.planning.lock import LOCK_FILE, STARTED_FILE, refuse_if_alive
from simpletuner.redaction import redact, redact_settings
from simpletuner.reporting.metrics import METRICS_FILE
from simpletuner.weights.lora_names import LORA_FILE

# Limits of the search for runs below a folder; a --root may be a whole disk.
DEPTH = 4
FOLDERS = 2000
BULKY = frozenset(
    {
        "branches",
        "cache",
        "checkpoint",
        "datasets",
        "node_modules",
        "site-packages",
        "validation_images",
    }
)
RESUME = "resume_from_checkpoint"
NOTHING_RUNS = "No active training job."
NOT_IN_LOOP = (
    "The run is starting, stopping or done with its last step. It can do this only between "
    "two steps."
)
PROGRAM = (sys.executable, "-m", "simpletuner")


class Runs:
    """The runs of a project. `Run` objects are cached per folder only to avoid reading files
    again.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self._runs: dict[Path, Run] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Run]:
        """All runs: active ones first, then the newest."""
        folders = (
            {self.project.run: ""} if self.project.run else self._recorded() | self._configured()
        )
        runs = [self.at(folder) for folder in folders]
        for run in runs:
            run.written_by = folders[run.folder]
        # Runs started here whose folder the search does not reach, or whose config names another
        # folder by now.
        runs += [run for run in self._runs.values() if run not in runs and run.child]
        return sorted(runs, key=lambda run: (run.pid is not None, run.seen), reverse=True)

    def find(self, name: str | None) -> Run:
        """The run with an id; without an id, the first run.

        Raises:
            Refusal: 404 if there is no such run.
        """
        # Known runs first, since a search visits many folders.
        known = [run for run in list(self._runs.values()) if run.id == name]
        for run in known or self.all():
            if name in (None, "", run.id):
                return run
        raise Refusal(404, f"There is no run {name!r}." if name else "There are no runs yet.")

    def at(self, folder: Path) -> Run:
        """The run of an output folder."""
        return self._runs.setdefault(folder, Run(run_id(folder), folder, self.project.run is None))

    def _recorded(self) -> dict[Path, str]:
        """Folders with the files of a run, near the top of the project."""
        walked = islice(
            (found for root in (self.project.folder, *self.project.roots) for found in walk(root)),
            FOLDERS,
        )
        return {
            folder: ""
            for folder, files in walked
            if {METRICS_FILE, LOCK_FILE, CONSOLE_FILE} & files
        }

    def _configured(self) -> dict[Path, str]:
        """The output folders of all configs; output folders of packaged examples only if they
        exist.
        """
        folders = {}
        for name in (
            *(served.EXAMPLE + name for name in example_names()),
            *self.project.config_names(),
        ):
            with suppress(UserError, OSError):
                folder = self.project.inside(output_dir_of(self.project.config_file(name)))
                if folder.is_dir() or not name.startswith(served.EXAMPLE):
                    folders[folder] = name
        return folders

    def start(self, name: str, settings: Mapping[str, Any]) -> Run:
        """Start training with a config, in a process that outlives this one.

        Args:
            settings: override settings of the config.

        Raises:
            Refusal: 404 if the config does not exist, 409 if its folder is in use, 422 with the
                problems of the settings, 403 on the page of a run.
        """
        run = self.started_by(name, settings)
        file = self.project.config_file(name)
        # The command line parses lists and objects from JSON.
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in settings.items()
        }
        options = [f"--{key}={text}" for key, text in texts.items() if not is_secret(key)]
        secrets = {key: text for key, text in texts.items() if is_secret(key)}
        # Two concurrent clicks must not both see a free folder.
        with self._lock:
            refuse_if_busy(run)
            after = last_id(run.folder / EVENTS_FILE)
            # Read before the process starts: later events belong to the new session.
            started = {"config": name, "settings": dict(settings), "after": after}
            write_json(run.folder / STARTED_FILE, started, private=True)
            arguments = ["train", served.chosen_by(name, file), *options]
            run.child = self.spawn(run.folder / CONSOLE_FILE, arguments, secrets)
        return run

    def started_by(self, name: str, settings: Mapping[str, Any]) -> Run:
        """The run that a config starts with further settings.

        Raises:
            Refusal: as `start`, except for folders in use.
        """
        if self.project.run is not None:
            raise Refusal(
                403, "This page belongs to a run; to start other runs, use `simpletuner server`."
            )
        self._existing(name)
        judgement, outside, _ = Configuration.saved(self.project, name, settings).judge()
        if fatal := [*outside, *(problem for problem in judgement.problems if problem.fatal)]:
            raise Refusal(422, fatal)
        return self.at(self.project.inside(judgement.config.run.output_dir))

    def _existing(self, config: str) -> Path:
        file = self.project.config_file(config)
        if not file.is_file():
            guess = did_you_mean(config, self.project.config_names())
            raise Refusal(404, f"There is no config {config!r}.{guess}")
        return file

    def settings_of(self, run: Run, more: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that restart a run in its folder, even if its config names another folder by
        now.

        Raises:
            Refusal: 400 if the run's config is unknown, 404 if it was deleted.
        """
        if not run.config:
            raise Refusal(400, f"No config of this project writes to {run.folder}.")
        written = self.project.inside(output_dir_of(self._existing(run.config)))
        here: dict[str, str] = {}
        if run.status()["can"]["continue"]:
            if written != run.folder:
                here["output_dir"] = str(run.folder)
            saved = Configuration.saved(self.project, run.config, run.settings).values
            if (
                saved.get(RESUME, "latest") != "latest"
            ):  # otherwise it would start the same branch again
                here[RESUME] = "latest"
        return {**run.settings, **here, **more}

    def spawn(
        self, console: Path, arguments: list[str], secrets: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command as a process that outlives this one; its output is appended to a file.

        Args:
            secrets: settings that are passed in the environment, which other users cannot read.
        """
        # Without variables that select a config: the command line names one.
        environment = {key: value for key, value in os.environ.items() if key not in ENV_VARIABLES}
        if secrets:
            environment[SECRET_SETTINGS] = json.dumps(secrets)
        with console.open("ab") as file:
            file.write(redact(f"{PROMPT}{shlex.join(arguments)}\n").encode())
            file.flush()
            child = subprocess.Popen(
                # In a new session, so that Ctrl-C in the server's terminal does not reach the run.
                [*PROGRAM, *arguments],
                cwd=self.project.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        threading.Thread(target=child.wait, daemon=True).start()  # reaps the zombie
        return child

    def renew(self, run: Run, name: str) -> str:
        """Write config/NAME/config.json: a run's config with another output folder, initialised
        with the run's LoRA.

        Raises:
            Refusal: 400 if the run has no config or LoRA, 409 if the new config exists, 422 if its
                name is invalid.
        """
        if not run.status()["can"]["new"]:
            raise Refusal(400, "A new run needs the config and the LoRA of a run that has ended.")
        file = self.project.new_config(name)
        datasets = {"data_backend_config": str(self._existing(run.config).with_name(DATASET_FILE))}
        # Secrets that were given to the run are not copied into a file.
        given = {
            key: value
            for key, value in run.settings.items()
            if redact_settings({key: value}) == {key: value}
        }
        settings = datasets | Configuration.saved(self.project, run.config, given).values
        settings = without_removed(settings, str(file), Problems())
        write_json(
            file,
            {**settings, "init_lora": str(run.folder / LORA_FILE), "output_dir": f"output/{name}"},
        )
        return name


def ask(run: Run, request: requests.Request) -> None:
    """Send a request to the training loop of a run; before the loop starts, only `stop`. Repeated
    requests are ignored.

    Raises:
        Refusal: 400 if the run has ended, or is not in its loop.
    """
    status = run.status()
    if not status["can"][request]:
        if status["status"] not in ACTIVE:
            raise Refusal(400, NOTHING_RUNS)
        if request != "stop" and request not in status["asked"]:
            raise Refusal(400, NOT_IN_LOOP)
    elif status["status"] == "running" or run.pid is None:
        requests.make_request(run.folder, request)
    else:
        send(run.pid, signal.SIGINT)


def cancel(run: Run) -> None:
    """End a run at once; progress since its last checkpoint is lost.

    Raises:
        Refusal: 400 if the run is not active on this machine.
    """
    if (pid := run.pid) is None:
        raise Refusal(400, NOTHING_RUNS)
    # SIGINT requests a stop, SIGTERM then interrupts; two equal signals might be merged.
    send(pid, signal.SIGINT, signal.SIGTERM)


def send(pid: int, *numbers: signal.Signals) -> None:
    """Send signals to a process; one that has ended is ignored.

    Raises:
        Refusal: 403 if the process belongs to another user.
    """
    try:
        for number in numbers:
            os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError:
        raise Refusal(403, f"Process {pid} belongs to another user.") from None


def refuse_if_busy(run: Run) -> None:
    """Check that no process uses a run's folder.

    Raises:
        Refusal: 409 if one does, or may.
    """
    try:
        # For a lock of another machine, the new process waits, and takes it over if it is stale.
        if (owner := run.owner) is not None:
            refuse_if_alive(run.folder / LOCK_FILE, owner)
        status = run.judge().status
    except (UserError, OSError) as error:
        raise Refusal(409, str(error)) from None
    if status in ACTIVE:
        raise Refusal(409, f"A run in {run.folder} is already {status}.")


def output_dir_of(file: Path) -> str:
    """The output folder of a config, even if the config has other problems.

    Raises:
        ConfigError: the file cannot be read.
    """
    folder = canonical(read_config_file(file, Problems()), Problems()).get("output_dir")
    return str(folder or all_options()["output_dir"].default)


def walk(root: Path) -> Iterator[tuple[Path, set[str]]]:
    """Walk folders and their files, skipping hidden folders, bulky folders and links."""
    for name, folders, files in os.walk(root):
        folder = Path(name)
        is_deep = len(folder.relative_to(root).parts) >= DEPTH
        kept = [] if is_deep else [folder for folder in folders if not folder.startswith(".")]
        folders[:] = sorted(each for each in kept if re.split(r"-\d", each)[0] not in BULKY)
        yield folder, set(files)


def run_id(folder: Path) -> str:
    """A name for URLs: the folder's name, made unique by a hash of its path."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name)
    return f"{name}-{hash_bytes(os.fsencode(folder))[:6]}"


GONE = 499  # nginx's status for a disconnected client; never received
LOOK = 0.25  # seconds between checks that the client is connected


async def plan_unsaved(request: Request) -> Response:
    """The document of `simpletuner plan --json` for settings that need not be saved.

    `device_memory_gb` and `device` plan for another GPU. Remote datasets are planned from
    downloaded files; `fetch` downloads missing files first. A separate process makes the plan and
    is killed when the client disconnects: the page requests a new plan after every change.
    """
    body = await read_object(request)
    project = project_of(request)
    unsaved = await run_in_threadpool(Configuration.sent, project, body)
    _, outside, _ = await run_in_threadpool(unsaved.judge)
    if outside:
        return JSONResponse({"ok": False, "problems": served.problems_json(outside)})
    with TemporaryDirectory(prefix="simpletuner-plan-") as folder:
        command = [*PROGRAM, "plan", "--json", *unsaved.write(Path(folder))]
        if body.get("fetch") is not True:
            command.append("--cached")
        for sent, flag in (("device_memory_gb", "--device-memory"), ("device", "--device")):
            if body.get(sent) is not None:
                command.append(f"{flag}={body[sent]}")
        output, messages = await run_while_wanted(request, command, project.folder)
    return JSONResponse(document_in(output, messages, folder))


async def run_while_wanted(
    request: Request, command: Sequence[str], folder: Path
) -> tuple[str, str]:
    """Run a command while the client is connected; returns its stdout and stderr.

    Raises:
        Refusal: the client has disconnected; the command is killed.
    """
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=pipe, stderr=pipe)
    reading = asyncio.create_task(child.communicate())
    try:
        while not (await asyncio.wait([reading], timeout=LOOK))[0]:
            if await request.is_disconnected():
                raise Refusal(GONE, "The client has disconnected.")
        output, messages = reading.result()
        return output.decode(errors="replace"), messages.decode(errors="replace")
    finally:
        if child.returncode is None:
            # A kill is safe, since plans write no files.
            child.kill()
            await reading


def document_in(output: str, messages: str, folder: str) -> dict[str, Any]:
    """The document printed by the command, without the names of temporary files."""
    try:
        document: dict[str, Any] = json.loads(
            output.replace(f" ({folder}/config.json)", "")
            .replace(f"{folder}/", "")
            .replace(" (command line)", "")
        )
        document["problems"] = [
            {**each, "message": redact(each["message"])} for each in document["problems"]
        ]
        return document
    except json.JSONDecodeError:
        last = redact(messages.strip().rpartition("\n")[2])
        return {
            "ok": False,
            "problems": [{"key": "", "message": f"The plan failed: {last}", "fatal": True}],
        }
