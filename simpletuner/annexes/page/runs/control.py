"""The processes that the page starts, finds, stops and continues.

Runs outlive the server; plans and dataset pages are killed when their client disconnects.
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
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.fitting.ready import CONSENT
from simpletuner.annexes.page.new.cards import why_unknown
from simpletuner.annexes.page.project import (
    EXAMPLE,
    Project,
    Refusal,
    chosen_by,
    problems_json,
    project_of,
    read_object,
)
from simpletuner.annexes.page.runs.archive import is_archived
from simpletuner.annexes.page.settings.files import Configuration
from simpletuner.annexes.payloads import EVENTS_FILE, last_id
from simpletuner.annexes.runs.console import CONSOLE_FILE, PROMPT
from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.runs.state import ACTIVE, ENDED
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
MOST_FOLDERS = 2000
# Folders with many files and no runs.
SKIPPED_FOLDERS = frozenset(
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
# Files that make a folder the folder of a run, and folders in it that hold no other runs.
RUN_FILES = frozenset({METRICS_FILE, LOCK_FILE, CONSOLE_FILE})
FOLDERS_OF_RUNS = frozenset(
    {"benchmarks", "failures", "model_card", "pipeline", "requests", "samples", "sweep"}
)
CONSENT_KEY = "i_know_what_i_am_doing"
CONSENT_ON_PAGE = (
    'To train on the CPU all the same, switch on "I Know What I Am Doing" in Settings.'
)
RESUME = "resume_from_checkpoint"
NOTHING_RUNS = "No active training job."
NOT_IN_LOOP = (
    "The run is starting, stopping or done with its last step. It can do this only between "
    "two steps."
)
SIGNAL_SECONDS = 3.0  # within which a run usually takes a signal
PROGRAM = (sys.executable, "-m", "simpletuner")


class Runs:
    """The runs of a project.

    `Run` objects are kept by folder only to avoid reading files again.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        self._runs: dict[Path, Run] = {}
        self._lock = threading.Lock()

    def all(self) -> list[Run]:
        """All runs that are not archived: active ones first, then the newest."""
        if self.project.run:
            configs = {self.project.run: ""}
        else:
            configs = self._recorded() | self._configured()
            configs = {folder: name for folder, name in configs.items() if not is_archived(folder)}
        runs = [self.at(folder) for folder in configs]
        for run in runs:
            run.written_by = configs[run.folder]
        # Runs started here whose folder the search does not reach, or whose config names another
        # folder by now.
        runs += [run for run in self._runs.values() if run not in runs and run.child]
        return sorted(runs, key=lambda run: (run.pid is not None, run.seen), reverse=True)

    def archived(self) -> list[Run]:
        """The archived runs, the newest first. They can be looked at, but not trained further."""
        if self.project.run:
            return []
        runs = [self.at(folder) for folder in self._recorded() if is_archived(folder)]
        for run in runs:
            run.may_start = False
        return sorted(runs, key=lambda run: run.seen, reverse=True)

    def forget(self, run: Run) -> None:
        """Forget a run whose folder was moved or deleted."""
        self._runs.pop(run.folder, None)

    @contextmanager
    def starting_nothing(self) -> Iterator[None]:
        """A block during which no run is started from here."""
        with self._lock:
            yield

    def find(self, name: str | None) -> Run:
        """The run with an id; without an id, the first run.

        Raises:
            Refusal: 404 if there is no such run.
        """
        # Known runs first, since a search visits many folders.
        known = [run for run in list(self._runs.values()) if run.id == name]
        for run in known or [*self.all(), *self.archived()]:
            if name in (None, "", run.id):
                return run
        raise Refusal(404, f"There is no run {name!r}." if name else "There are no runs yet.")

    def at(self, folder: Path) -> Run:
        """The run of an output folder."""
        may_start = self.project.run is None
        run = Run(run_id(folder), folder, may_start, project=self.project.folder)
        return self._runs.setdefault(folder, run)

    def _recorded(self) -> dict[Path, str]:
        """Folders with the files of a run, near the top of the project."""
        roots = (self.project.folder, *self.project.roots)
        walked = islice(chain.from_iterable(map(walk, roots)), MOST_FOLDERS)
        return {folder: "" for folder, files in walked if RUN_FILES & files}

    def _configured(self) -> dict[Path, str]:
        """The output folders of all configs, by which a later name replaces an earlier one.

        Those of packaged examples are included only if they exist.
        """
        folders = {}
        examples = [EXAMPLE + name for name in example_names()]
        for name in (*examples, *self.project.config_names()):
            with suppress(UserError, OSError):
                folder = self.project.inside(output_dir_of(self.project.config_file(name)))
                if folder.is_dir() or not name.startswith(EXAMPLE):
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
        arguments, secrets = self.arguments(name, settings)
        # Two concurrent clicks must not both see a free folder.
        with self._lock:
            refuse_if_busy(run)
            # Read before the process starts: later events belong to the new session.
            after = last_id(run.folder / EVENTS_FILE)
            started = {"config": name, "settings": dict(settings), "after": after}
            write_json(run.folder / STARTED_FILE, started, private=True)
            run.child = self.spawn(run.folder / CONSOLE_FILE, ["train", *arguments], secrets)
        return run

    def arguments(self, name: str, settings: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """The arguments of a command for a config with further settings; and those that are secret.

        Secrets are passed in the environment, since all users can list the arguments of processes.
        """
        # The command line parses lists and objects from JSON.
        texts = {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in settings.items()
        }
        options = [f"--{key}={text}" for key, text in texts.items() if not is_secret(key)]
        secrets = {key: text for key, text in texts.items() if is_secret(key)}
        return [chosen_by(name, self.project.config_file(name)), *options], secrets

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
        fatal = [problem for problem in judgement.problems if problem.fatal]
        if outside or fatal:
            raise Refusal(422, [*outside, *fatal])
        return self.at(self.project.inside(judgement.config.run.output_dir))

    def _existing(self, config: str) -> Path:
        """The file of a config, which must exist."""
        file = self.project.config_file(config)
        if not file.is_file():
            guess = did_you_mean(config, self.project.config_names())
            raise Refusal(404, f"There is no config {config!r}.{guess}")
        return file

    def settings_of(self, run: Run, more: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that restart a run in its folder, with `more` settings.

        Raises:
            Refusal: 400 if the run's config is unknown, 404 if it was deleted.
        """
        if not run.config:
            raise Refusal(400, f"No config of this project writes to {run.folder}.")
        config_folder = self.project.inside(output_dir_of(self._existing(run.config)))
        changes: dict[str, str] = {}
        if run.status()["can"]["continue"]:
            # The config may name another folder by now.
            if config_folder != run.folder:
                changes["output_dir"] = str(run.folder)
            saved = Configuration.saved(self.project, run.config, run.settings).values
            # A step that the config names would start the same branch again.
            if saved.get(RESUME, "latest") != "latest":
                changes[RESUME] = "latest"
        return {**run.settings, **changes, **more}

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
                [*PROGRAM, *arguments],
                cwd=self.project.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # So that Ctrl-C in the server's terminal does not reach the run.
                start_new_session=True,
            )
        threading.Thread(target=child.wait, daemon=True).start()  # reaps the zombie
        return child

    def renew(self, run: Run, name: str) -> list[str]:
        """Write config/NAME/config.json, which trains a run's LoRA further in a new folder.

        Returns:
            which settings were left out, since this version no longer has them.

        Raises:
            Refusal: 400 if the run has no config or LoRA, 409 if the new config exists, 422 if its
                name is invalid.
        """
        if not run.status()["can"]["new"]:
            raise Refusal(400, "A new run needs the config and the LoRA of a run that has ended.")
        file = self.project.new_config(name)
        # The default, which is beside the config, would be beside the new config.
        datasets = {"data_backend_config": str(self._existing(run.config).with_name(DATASET_FILE))}
        # Secrets that were passed to the run are not copied into a file.
        overrides = {
            key: value
            for key, value in run.settings.items()
            if redact_settings({key: value}) == {key: value}
        }
        settings = datasets | Configuration.saved(self.project, run.config, overrides).values
        left_out = Problems()
        settings = without_removed(settings, str(file), left_out)
        settings["init_lora"] = str(run.folder / LORA_FILE)
        settings["output_dir"] = f"output/{name}"
        write_json(file, settings)
        return [problem.message for problem in left_out]


def ask(run: Run, request: requests.Request) -> None:
    """Send a request to the training loop of a run; a repeated request is ignored.

    Raises:
        Refusal: 400 if the run has ended, or is not in its loop; `stop` needs no loop.
    """
    status = run.status()
    if not status["can"][request]:
        if status["status"] not in ACTIVE:
            raise Refusal(400, NOTHING_RUNS)
        if request != "stop" and request not in status["asked"]:
            raise Refusal(400, NOT_IN_LOOP)
        return
    if status["status"] == "running" or run.pid is None:
        requests.make_request(run.folder, request)
    else:
        # The loop, which reads requests, has not started.
        send(run.pid, signal.SIGINT)


def cancel(run: Run) -> None:
    """End a run at once; progress since its last checkpoint is lost.

    Raises:
        Refusal: 400 if the run is not active on this machine.
    """
    pid = run.pid
    if pid is None and run.host:
        raise Refusal(400, f"The run is on {run.host} and can be cancelled only there.")
    if pid is None:
        raise Refusal(400, NOTHING_RUNS)
    # A process that was stopped from outside receives the signal only once it goes on.
    send(pid, signal.SIGINT, signal.SIGCONT)
    # Between steps, the first signal only asks for a stop, and the second one interrupts. It must
    # not be sent before the first one is handled, or they would be merged.
    if not _ends_soon(run, pid):
        send(pid, signal.SIGINT)


def _ends_soon(run: Run, pid: int) -> bool:
    """Wait until a run has taken a first signal; returns whether that has ended it."""
    deadline = time.monotonic() + SIGNAL_SECONDS
    time.sleep(0.1)  # it may be stopping already, by a request
    while time.monotonic() < deadline:
        state = run.read().status
        if run.pid != pid or state in ENDED:
            return True
        if state == "stopping":
            return False
        time.sleep(0.05)
    return False


def resume(run: Run) -> None:
    """Let a process go on that was stopped from outside.

    Raises:
        Refusal: 400 if the run is not active on this machine.
    """
    pid = run.pid
    if pid is None:
        raise Refusal(400, NOTHING_RUNS)
    send(pid, signal.SIGCONT)


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
        owner = run.owner
        if owner is not None:
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
    """Walk folders and the names of their files, without links, hidden and skipped folders."""
    for path, folders, files in os.walk(root):
        folder = Path(path)
        is_deep = len(folder.relative_to(root).parts) >= DEPTH
        left_out = FOLDERS_OF_RUNS if RUN_FILES & set(files) else frozenset()
        # `os.walk` visits the folders that are left in this list.
        folders[:] = [] if is_deep else sorted(filter(_is_searched, set(folders) - left_out))
        yield folder, set(files)


def _is_searched(name: str) -> bool:
    """Whether the search for runs visits a folder of this name."""
    kind, *_ = re.split(r"-\d", name)  # `checkpoint` of `checkpoint-100`
    return not name.startswith(".") and kind not in SKIPPED_FOLDERS


def run_id(folder: Path) -> str:
    """A name for URLs: the folder's name, made unique by a hash of its path."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name)
    return f"{name}-{hash_bytes(os.fsencode(folder))[:6]}"


DISCONNECTED = 499  # nginx's status for a disconnected client, which never receives it
POLL_SECONDS = 0.25  # between checks that the client is connected


async def plan_unsaved(request: Request) -> Response:
    """The document of `simpletuner plan --json` for settings that need not be saved.

    `device_memory_gb` and `device` in the body plan for another GPU. Remote datasets are planned
    from downloaded files; `fetch` downloads missing files first. A separate process makes the plan
    and is killed when the client disconnects: the page requests a new plan after every change.
    """
    body = await read_object(request)
    unknown = why_unknown(str(body["device"])) if body.get("device") else ""
    if unknown:
        # The command would speak of its flags.
        problem = {"key": "", "message": unknown, "fatal": True}
        return JSONResponse({"ok": False, "problems": [problem]})
    project = project_of(request)
    unsaved = await run_in_threadpool(Configuration.sent, project, body)
    _, outside, _ = await run_in_threadpool(unsaved.judge)
    if outside:
        return JSONResponse({"ok": False, "problems": problems_json(outside)})
    with TemporaryDirectory(prefix="simpletuner-plan-") as folder:
        command = [*PROGRAM, "plan", "--json", *unsaved.write(Path(folder))]
        if body.get("fetch") is not True:
            command.append("--cached")
        for key, flag in (("device_memory_gb", "--device-memory"), ("device", "--device")):
            if body.get(key) is not None:
                command.append(f"{flag}={body[key]}")
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
        while True:
            done, _ = await asyncio.wait([reading], timeout=POLL_SECONDS)
            if done:
                break
            if await request.is_disconnected():
                raise Refusal(DISCONNECTED, "The client has disconnected.")
        output, messages = reading.result()
        return output.decode(errors="replace"), messages.decode(errors="replace")
    finally:
        if child.returncode is None:
            # A kill is safe, since plans write no files.
            child.kill()
            await reading


def document_in(output: str, messages: str, folder: str) -> dict[str, Any]:
    """The document printed by the command, without the names of temporary files."""
    for source in (f" ({folder}/config.json)", f"{folder}/", " (command line)"):
        output = output.replace(source, "")
    try:
        document: dict[str, Any] = json.loads(output)
    except json.JSONDecodeError:
        last_line = redact(messages.strip().rpartition("\n")[2])
        problem = {"key": "", "message": f"The plan failed: {last_line}", "fatal": True}
        return {"ok": False, "problems": [problem]}
    for problem in document["problems"]:
        problem["message"] = redact(problem["message"])
        if problem.get("kind") == "consent":
            # The page has neither a terminal nor `--yes`, but a button for the remedy.
            problem["message"] = problem["message"].replace(CONSENT, CONSENT_ON_PAGE)
            problem["remedy"] = {CONSENT_KEY: True}
    return document
