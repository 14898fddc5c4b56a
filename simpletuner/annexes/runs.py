"""The state of a run, read from its process and its output folder.

No state is stored: after a crash of the run, the server or the machine, everything is read from the folder again.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import psutil

from simpletuner.annexes.figures import Columns
from simpletuner.annexes.payloads import EVENTS_FILE, last_lines
from simpletuner.config.json_reader import read_json
from simpletuner.distributed.requests import FOLDER, REQUESTS
from simpletuner.errors import Problems, UserError
from simpletuner.planning.checkpoint_folder import find_checkpoints, result_step
from simpletuner.planning.lineage import continuation
from simpletuner.planning.lock import LOCK_FILE, STARTED_FILE, Owner, read_owner
from simpletuner.redaction import redact
from simpletuner.reporting.metrics import METRICS_FILE, parse_row
from simpletuner.reporting.wording import clock
from simpletuner.weights.lora_names import LORA_FILE

Status = Literal["idle", "starting", "running", "completed", "error", "cancelled", "interrupted", "broken"]
CONSOLE_FILE = "console.log"
PROMPT = "$ simpletuner "  # prefix of the line in console.log with the command of a session
PART = 1 << 18  # bytes read at a time; maximum length of a line
CONSOLE_PART = 1 << 16
RECENT = 200
NOTICES = 100
STEP_STATUS, MESSAGE = b'"type": "training.status"', b'"message"'
INTERRUPTED = ("Interrupted.", "KeyboardInterrupt")  # last line of the console; the second if Python was still starting
BUTTONS = ("start", "continue", "new", "stop", "cancel", "save", "preview", "stop_at_epoch_end")
ACTIVE = ("starting", "running")
IN_LOOP = ("running", "stopping")
ENDED: Mapping[str, Status] = {"completed": "completed", "failed": "error", "cancelled": "cancelled"}
STOPS_LATER = "The run will stop at the end of"  # prefix of the notice that confirms that request
# Seconds without a heartbeat after which a run on another machine counts as ended.
SILENCE = 900.0
QUIET = 60.0  # seconds without events after which the page reports silence; the run may be loading a large model


@dataclass(eq=False)
class Tail:
    """Follows a growing file of JSON lines: returns every line once, reading at most `PART` bytes at a time.

    Attributes:
        number: a key that every object must have, with an integer value.
        renew: called before a replaced or truncated file is read again.
        damage: describes the first invalid complete line; empty if there is none.
    """

    path: Path
    number: str
    renew: Callable[[], None] = lambda: None
    damage: str = field(default="", init=False)
    _file: int = field(default=0, init=False)
    _offset: int = field(default=0, init=False)

    def lines(self) -> list[bytes]:
        """The next complete lines; none at the end of the file."""
        try:
            # Only a regular file: opening a pipe would block.
            file = self.path.open("rb") if self.path.is_file() else None
        except FileNotFoundError:  # a new run has just deleted it
            file = None
        if file is None:
            if self._file:
                self._restart(0)
            return []
        with file:
            status = os.fstat(file.fileno())
            # Detects an atomic replacement and truncation.
            if status.st_ino != self._file or status.st_size < self._offset:
                self._restart(status.st_ino)
            file.seek(self._offset)
            part = file.read(PART)
        # A line longer than PART is not an event: it is returned in pieces that do not parse.
        end = part.rfind(b"\n") + 1 or (PART if len(part) == PART else 0)
        self._offset += end
        return part[:end].splitlines(keepends=True)

    def _restart(self, file: int) -> None:
        self._file, self._offset, self.damage = file, 0, ""
        self.renew()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The objects in all new lines."""
        while lines := self.lines():
            yield from filter(None, map(self.parse, lines))

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """The object in a line; None if the line is invalid."""
        row = parse_row(line, self.number)
        if row is None:
            self.reject(line)
        return row

    def reject(self, line: bytes) -> None:
        """Record an invalid line; only the first one is reported."""
        self.damage = self.damage or damage_of(self.path, line)


def damage_of(path: Path, line: bytes) -> str:
    """The message about an invalid line."""
    text = redact(line.decode(errors="replace").strip())
    return f"{path.name} has an invalid line: {text:.200}"


class Record:
    """The metrics of a run; only new lines are read."""

    def __init__(self, folder: Path) -> None:
        self._lock, self._columns = threading.Lock(), Columns()
        self._tail = Tail(folder / METRICS_FILE, "step", renew=self._begin)

    def _begin(self) -> None:
        self._columns = Columns()

    def read(self) -> tuple[Columns, str]:
        """The metrics of all steps, and a message about an invalid line."""
        with self._lock:
            for row in self._tail.rows():
                self._columns.add(row)
            return self._columns, self._tail.damage


# The columns of 100,000 steps take about 15 MB, so only those of recently viewed runs are cached.
record_in = lru_cache(maxsize=3)(Record)


def last_step(path: Path) -> tuple[dict[str, Any], str]:
    """The metrics of the last step in a record, and a message about an invalid line after it."""
    metrics, damage = dict[str, Any](), ""
    for line in reversed(last_lines(path, PART)):
        row = parse_row(line)
        # Rows of a step are merged: on resume, an evaluation has a separate row.
        if row and metrics and row["step"] != metrics["step"]:
            break
        metrics = (row or {}) | metrics
        damage = damage_of(path, line) if row is None and line.endswith(b"\n") else damage
    return metrics, damage


@dataclass
class Story:
    """The newest session of a run, according to its events.

    Attributes:
        first: id of the first event.
        id: id of the last event.
        status: status of the last `training.status` with progress; empty before the first.
        progress: progress of the steps, with the latest metrics.
        stages: the latest state of every stage, by key.
        notices: texts of warnings and of confirmed requests.
        growing: unfinished previews by prompt, weights and index.
    """

    job_id: str = ""
    first: int = 0
    id: int = 0
    status: str = ""
    message: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    growing: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)

    def begin(self, job_id: str = "", progress: Mapping[str, Any] | None = None) -> None:
        """Reset the story for a new session."""
        vars(self).update(vars(Story(job_id, progress=dict(progress or {}))))

    def copy(self) -> Story:
        """A copy, for a thread that reads the story while another one adds to it."""
        return replace(self, stages=dict(self.stages), growing=dict(self.growing))

    def follow(self, tail: Tail) -> None:
        """Add the new events of a log."""
        while lines := tail.lines():
            for line, after in zip(lines, [*lines[1:], b""], strict=True):
                # Step events, nearly all events of a long run, are parsed only if no other step event follows.
                if not (is_step(line) and is_step(after)) and (event := tail.parse(line)):
                    try:
                        self.add(event)
                    except Exception:  # noqa: BLE001 - an invalid event may raise any error
                        tail.reject(line)

    def add(self, event: Mapping[str, Any]) -> None:
        """Add an event; raises if a field that the page computes with is not a number."""
        if event["job_id"] != self.job_id:
            self.begin(str(event["job_id"]), self.progress)
            self.first = event["id"]
        self.id = event["id"]
        match event["type"]:
            case "training.status" if "progress" in event:
                self.status = str(event["data"]["status"])
                self.progress = self.progress | progress_of(event["progress"])  # some events have no metrics
                self.message = str(event.get("message", self.message))
            case "lifecycle.stage":
                stage = {name: str(event["stage"][name]) for name in ("key", "label", "status")}
                done = event["stage"]["progress"]
                self.stages[stage["key"] or stage["label"]] = {
                    **stage, "progress": done and progress_of(done), "message": str(event.get("message", ""))
                }  # fmt: skip
                if stage["status"] != "running":
                    self.growing.clear()  # interrupted previews never finish
            case "validation.image":
                self.growing[shot_of(event)] = growing_preview(event)
            case "training.validation":
                self.growing.pop(shot_of(event), None)
            # Warnings and confirmed requests; other notices repeat the message of the run.
            case "notification" if event["severity"] == "warning" or str(event["message"]).startswith(STOPS_LATER):
                self.notices = [*self.notices, str(event["message"])][-NOTICES:]


def is_step(line: bytes) -> bool:
    """Whether a line contains only step progress."""
    return STEP_STATUS in line and MESSAGE not in line


def progress_of(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The progress in an event; raises a TypeError if a value is not a number."""
    numbers = {name: progress[name] and progress[name] + 0 for name in ("total", "percent", "eta_seconds")}
    metrics = {"metrics": dict(progress["metrics"])} if "metrics" in progress else {}
    return {**progress, "current": progress["current"] + 0, **numbers, **metrics}


def growing_preview(event: Mapping[str, Any]) -> dict[str, Any]:
    """The unfinished preview in an event."""
    data, path = event["data"], (event["images"] or [event["videos"][0]["src"]])[0]
    width, height = map(int, data["resolution"])
    named = {name: str(data[name]) for name in ("name", "step_label")}
    return {**named, "path": str(path), "width": width, "height": height}


def shot_of(event: Mapping[str, Any]) -> tuple[str, str, int]:
    """The prompt, weights and index of a preview event."""
    data = event["data"]
    return str(data["name"]), str(data["validation_type"]), int(data["index"])


@dataclass(eq=False)
class Run:
    """The run in an output folder.

    Attributes:
        id: name in URLs.
        may_start: whether this server starts runs.
        written_by: the project's config whose output folder this is; empty if there is none.
        child: the process that this server started for the run.
    """

    id: str
    folder: Path
    may_start: bool = True
    written_by: str = ""
    child: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._lock, self._story = threading.Lock(), Story()
        self._events = Tail(self.folder / EVENTS_FILE, "id", renew=self._story.begin)

    def read(self) -> Story:
        """The newest session, up to its last event."""
        with self._lock:
            self._story.follow(self._events)
            return self._story.copy()

    @property
    def metrics(self) -> Columns:
        """The current metrics of all steps."""
        return record_in(self.folder).read()[0]

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The newest events."""
        lines = last_lines(self.folder / EVENTS_FILE, PART)[-RECENT:]
        return [event for line in lines if (event := parse_row(line, "id"))]

    @property
    def name(self) -> str:
        """The name of the folder; bytes that are not UTF-8 are replaced."""
        return as_text(self.folder.name)

    @property
    def started(self) -> Mapping[str, Any]:
        """The page's last start: `config`, `settings`, and `after`, the id of the event before it; else empty."""
        return read_json(self.folder / STARTED_FILE, Problems(), dict) or {}

    @property
    def config(self) -> str:
        """The config that the run is started with; empty if unknown."""
        return str(self.started.get("config", self.written_by))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that the run is started with besides the config."""
        settings = self.started.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def owner(self) -> Owner | None:
        """The owner of the folder's lock.

        Raises:
            UserError: the lock is damaged.
        """
        return read_owner(self.folder / LOCK_FILE)

    @property
    def pid(self) -> int | None:
        """The id of the run's process on this machine; None if there is none."""
        if self.child is not None and self.child.poll() is None:
            return self.child.pid
        try:
            owner = self.owner
        except (OSError, UserError):
            return None
        return owner.pid if owner and owner.lives_here else None

    @property
    def seen(self) -> float:
        """When the run last wrote to its folder, as a Unix time; 0 if it never has."""
        times = [0.0]
        for name in (EVENTS_FILE, METRICS_FILE, LOCK_FILE, CONSOLE_FILE):
            with suppress(OSError):
                times.append((self.folder / name).stat().st_mtime)
        return max(times)

    @property
    def console(self) -> str:
        """The end of console.log."""
        return printed(self.folder / CONSOLE_FILE)

    def judge(self) -> tuple[Status, str, Story]:
        """The state of the run, a message about it, and its newest session."""
        # Checked before reading events: a run that ends in between was alive, or has reported its end.
        owner, is_alive = self.owner, self.pid is not None
        story = self.read()
        # Sessions are told apart by event ids, not by times, since clocks may be changed.
        after, before = self.started.get("after"), owner.after if owner else -1
        is_silent, is_on_console = story.id == after, after in (story.id, story.first - 1)
        last = said_at_the_end(self.console, only_errors=not is_silent) if is_on_console and not is_alive else ""
        if is_silent or story.id <= before:
            story = Story(progress=story.progress)
        return *self._judge(owner, is_alive, story, last), story

    def _judge(self, owner: Owner | None, is_alive: bool, story: Story, last: str) -> tuple[Status, str]:
        is_elsewhere = owner is not None and owner.host != socket.gethostname()
        # A reported end takes precedence over the process, which may take a while to exit.
        if story.status in ENDED:
            return ENDED[story.status], story.message
        if is_alive or (is_elsewhere and time.time() - self.seen < SILENCE):
            where = f"On {owner.host}. " if owner and is_elsewhere else ""
            return "running" if story.status in IN_LOOP else "starting", where + story.message
        if is_elsewhere:
            return "interrupted", f"No heartbeat for {clock(time.time() - self.seen)}. {owner}"
        return self._judge_end(owner is not None or story.status in ("starting", *IN_LOOP), last)

    def _judge_end(self, was_at_work: bool, last: str) -> tuple[Status, str]:
        """The state of a session that did not report its end; `last` are its last console lines."""
        if last:
            return ("cancelled", INTERRUPTED[0]) if last in INTERRUPTED else ("error", last)
        step = last_step(self.folder / METRICS_FILE)[0].get("step", 0)
        if was_at_work:
            return "interrupted", self._describe_interruption(step)
        if not step:
            return "idle", ""
        if step == (result_step(self.folder, "lora") or result_step(self.folder, "full")):
            return "completed", f"{step:,} steps are done."
        return "cancelled", f"Stopped at step {step:,}."

    def _describe_interruption(self, step: int) -> str:
        if not step:
            return "Ended unexpectedly before the first step."
        newest = find_checkpoints(self.folder)[0][-1:]
        then = f"It {continuation(self.folder, newest[0])}" if newest else "Without a checkpoint, it starts over"
        return f"Ended unexpectedly at step {step:,}. {then}."

    def status(self) -> dict[str, Any]:
        """The response of `GET /api/training/status`. Never raises: a broken run must not hide the others."""
        blank = {
            "status": "idle",
            "job_id": "",
            "run": self.id,
            "progress": {"current": 0, "total": None, "percent": None, "eta_seconds": None, "metrics": {}},
            "stages": {},
            "config": {"name": self.written_by, "output_dir": as_text(self.folder)},
            "message": "",
            "can": dict.fromkeys(BUTTONS, False) | {"cancel": self.pid is not None},
            "asked": [],
        }
        try:
            known = self._status(blank)
            json.dumps(known, allow_nan=False, ensure_ascii=False).encode()  # fails for NaN and lone surrogates
        except Exception as error:  # noqa: BLE001 - damaged files may raise any error
            return blank | {"status": "broken", "message": redact(str(error) or type(error).__name__)}
        return known

    def _status(self, blank: dict[str, Any]) -> dict[str, Any]:
        (state, message, story), (last, damage) = self.judge(), last_step(self.folder / METRICS_FILE)
        is_active, step, damage = state in ACTIVE, last.get("step", 0), self._events.damage or damage
        if damage and not is_active:
            state, message = "broken", "\n".join(filter(None, (damage, message)))
        idle = self._idleness(state, story)
        progress = advanced(blank["progress"] | story.progress, last, goes_on=state == "running" and not idle)
        in_loop = (state, story.status) == ("running", "running")
        has_next_step = in_loop and (progress["total"] is None or progress["current"] < progress["total"])
        asked = requested(self.folder / FOLDER) if in_loop else []
        stop = is_active and story.status != "stopping" and "stop" not in asked
        return blank | {
            "status": state,
            "job_id": story.job_id,
            "progress": progress,
            "stages": story.stages if is_active else over(story.stages),
            "config": blank["config"] | {"name": self.config},
            "message": idle or ("Stops after this step and its previews." if "stop" in asked else redact(message)),
            "asked": asked,
            "can": blank["can"]
            | dict.fromkeys(("save", "preview", "stop_at_epoch_end"), has_next_step)
            | {"stop": stop}
            | ({} if is_active else self._beginnings(step)),
        }

    def _idleness(self, state: Status, story: Story) -> str:
        """Why a running process makes no progress; empty if it does, or runs on another machine."""
        owner = self.owner if state in ACTIVE else None
        if owner is None or not owner.lives_here:
            return ""
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(owner.pid).status() == psutil.STATUS_STOPPED:
                return f"Process {owner.pid} is stopped. To resume it: kill -CONT {owner.pid}"
        logged = (self.folder / EVENTS_FILE).stat().st_mtime if story.id else 0.0
        silence = time.time() - max(logged, owner.since)
        pace = story.progress.get("metrics", {}).get("seconds_per_step") or 0.0
        return f"No events for {clock(silence)}." if silence > max(QUIET, 3 * pace) else ""

    def _beginnings(self, step: int) -> dict[str, bool]:
        """Which kinds of sessions can begin while none is active."""
        is_free = self.may_start and bool(self.config) and self.pid is None
        has_lora = (self.folder / LORA_FILE).is_file()
        return {"start": is_free and not step, "continue": is_free and step > 0, "new": is_free and has_lora}


def advanced(progress: dict[str, Any], last: Mapping[str, Any], *, goes_on: bool) -> dict[str, Any]:
    """The progress from events, updated with the last row of the record.

    Events of fast steps are throttled. The record has every step, so it shows how far a killed run got.
    """
    current = last.get("step", progress["current"])
    percent = progress["total"] and round(100 * current / progress["total"], 1)
    left = progress["eta_seconds"] if goes_on else None
    return {
        **progress, "current": current, "percent": percent, "eta_seconds": left, "metrics": progress["metrics"] | last
    }  # fmt: skip


def requested(folder: Path) -> list[str]:
    """The requests that a run has not processed yet."""
    return [request for request in REQUESTS if (folder / request).exists()]


def over(stages: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The stages of a run that has ended; running ones have failed."""
    failed = {key: {**stage, "status": "failed"} for key, stage in stages.items() if stage["status"] == "running"}
    return {**stages, **failed}


def printed(file: Path) -> str:
    """The end of a command's output, without secrets and overwritten progress bars."""
    lines = b"".join(last_lines(file, CONSOLE_PART)).decode(errors="replace").split("\n")
    return redact("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))


def said_at_the_end(console: str, *, only_errors: bool = False) -> str:
    """The errors of the newest session in a console.log, or else its last line."""
    lines = re.split(rf"^{re.escape(PROMPT)}.*$", console, flags=re.MULTILINE)[-1].strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "\n".join(errors or ([] if only_errors else lines[-1:]))


def as_text(path: str | Path) -> str:
    """A path as text; bytes that are not UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")
