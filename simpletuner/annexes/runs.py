"""The state of a run, read from its process and its output folder. Free of torch.

Nothing is kept here that could not be read again: after a crash of the run, the server or the machine, the folder still
shows what happened.
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
from typing import Any, BinaryIO, Literal

import psutil

from simpletuner.annexes.figures import Columns
from simpletuner.annexes.payloads import EVENTS_FILE, read_events
from simpletuner.config.values import read_json
from simpletuner.distributed.requests import FOLDER, REQUESTS
from simpletuner.errors import UserError, result_of
from simpletuner.models.lora_keys import LORA_FILE
from simpletuner.redaction import redact
from simpletuner.reporting.metrics import METRICS_FILE, parse_row
from simpletuner.reporting.pace import clock
from simpletuner.run.lock import LOCK_FILE, Owner, read_owner
from simpletuner.training.manifest import result_step

Status = Literal["idle", "starting", "running", "completed", "error", "cancelled", "interrupted", "broken"]
CONSOLE_FILE = "console.log"
PROMPT = "$ simpletuner "  # begins the line of console.log that names the command of a session
STARTED_FILE = "started.json"  # what the page started last: which config, with which settings, after which event
PART = 1 << 18  # bytes read at a time; no line is longer
CONSOLE_PART = 1 << 16
RECENT = 200
NOTICES = 100
STEP_STATUS, MESSAGE = b'"type": "training.status"', b'"message"'
INTERRUPTED = ("Interrupted.", "KeyboardInterrupt")  # ends the console; the second, while Python itself was starting
BUTTONS = ("start", "continue", "new", "stop", "cancel", "save", "preview", "stop_at_epoch_end")
ACTIVE = ("starting", "running")
IN_LOOP = ("running", "stopping")
ENDED: Mapping[str, Status] = {"completed": "completed", "failed": "error", "cancelled": "cancelled"}
STOPS_LATER = "The run will stop at the end of"  # begins the answer to that request
# Seconds without a sign of life after which a run on another machine, which cannot be asked, counts as ended.
SILENCE = 900.0
QUIET = 60.0  # seconds without news from a process of this machine that the page mentions; it may load a large model


@dataclass(eq=False)
class Tail:
    """Follows a growing file of JSON lines: returns every line once, and holds at most one part of them in memory.

    Attributes:
        number: a key that every object has, with a whole number.
        begin: finds the offset to begin at, in the file and in every file that replaces it.
        renew: called before a replaced, truncated or rewritten file is read again.
        damage: describes the first complete line that is no such object; empty without one.
    """

    path: Path
    number: str
    begin: Callable[[BinaryIO], int] = lambda file: 0
    renew: Callable[[], None] = lambda: None
    damage: str = field(default="", init=False)
    _file: int = field(default=0, init=False)
    _offset: int = field(default=0, init=False)
    _before: bytes = field(default=b"", init=False)

    def lines(self) -> list[bytes]:
        """The next complete lines; none at the end of the file."""
        try:
            # To open a pipe would wait for its writer.
            file = self.path.open("rb") if self.path.is_file() else None
        except FileNotFoundError:  # a new run has just deleted it
            file = None
        if file is None:
            if self._file:
                self._restart(0, 0)
            return []
        with file:
            now = os.fstat(file.fileno())
            # Replaced by an atomic write, truncated, or its last lines by another, as on a full disk.
            is_same = now.st_ino == self._file and now.st_size >= self._offset
            if not is_same or byte_before(file, self._offset) != self._before:
                self._restart(now.st_ino, self.begin(file))
                self._before = byte_before(file, self._offset)
            file.seek(self._offset)
            part = file.read(PART)
        # A line longer than a part is no event: it is passed on in pieces that do not parse.
        end = part.rfind(b"\n") + 1 or (PART if len(part) == PART else 0)
        self._offset, self._before = self._offset + end, part[:end][-1:] or self._before
        return part[:end].splitlines(keepends=True)

    def _restart(self, file: int, offset: int) -> None:
        self._file, self._offset, self.damage = file, offset, ""
        self.renew()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The objects in all new lines."""
        while lines := self.lines():
            yield from filter(None, map(self.parse, lines))

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """The object in a line."""
        row = parse_row(line, self.number)
        if row is None:
            self.reject(line)
        return row

    def reject(self, line: bytes) -> None:
        """Note that a line cannot be used; the first one is reported."""
        self.damage = self.damage or damage_of(self.path, line)


def byte_before(file: BinaryIO, offset: int) -> bytes:
    """The byte before a place in a file; none at its beginning."""
    file.seek(max(0, offset - 1))
    return file.read(min(1, offset))


def damage_of(path: Path, line: bytes) -> str:
    """A sentence about a line that cannot be used."""
    text = redact(line.decode(errors="replace").strip())
    return f"{path.name} has a line that cannot be used: {text:.200}"


class Record:
    """The metrics of a run, as of now; only what is new is read."""

    def __init__(self, folder: Path) -> None:
        self._lock, self._columns = threading.Lock(), Columns()
        self._tail = Tail(folder / METRICS_FILE, "step", renew=self._begin)

    def _begin(self) -> None:
        self._columns = Columns()

    def read(self) -> tuple[Columns, str]:
        """The metrics of all steps, and a sentence about an unusable line."""
        with self._lock:
            for row in self._tail.rows():
                self._columns.add(row)
            return self._columns, self._tail.damage


# The columns of 100,000 steps take some 15 MB, so only those of the runs viewed last are kept.
record_in = lru_cache(maxsize=3)(Record)


def last_step(path: Path) -> tuple[dict[str, Any], str]:
    """The metrics of the last step in a record, and a sentence about an unusable line after it."""
    metrics, damage = dict[str, Any](), ""
    for line in reversed(ending(path, PART)):
        row = parse_row(line)
        # Rows of one step add up: on resume, an evaluation has a row of its own.
        if row and metrics and row["step"] != metrics["step"]:
            break
        metrics = (row or {}) | metrics
        damage = damage_of(path, line) if row is None and line.endswith(b"\n") else damage
    return metrics, damage


def ending(path: Path, size: int) -> list[bytes]:
    """The last lines of a file, including an unfinished one; none if it does not exist."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(start)
        return file.read().splitlines(keepends=True)[1 if start else 0 :]


@dataclass
class Story:
    """The newest session of a run, according to its events.

    Attributes:
        first: the id of the first event.
        id: of the last event.
        status: of the last `training.status` with progress; empty before the first.
        progress: of the steps, with the newest metrics.
        stages: the newest state of every stage, by key.
        notices: the texts of warnings, and of the answer to a button.
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
        """Forget everything."""
        vars(self).update(vars(Story(job_id, progress=dict(progress or {}))))

    def copy(self) -> Story:
        """The story so far, for a thread that uses it while another one adds to it."""
        return replace(self, stages=dict(self.stages), growing=dict(self.growing))

    def follow(self, tail: Tail) -> None:
        """Take in the new events of a log."""
        while lines := tail.lines():
            for line, after in zip(lines, [*lines[1:], b""], strict=True):
                # Of steps, which are nearly all events of a long run, only the last counts; the others are not parsed.
                if not (is_step(line) and is_step(after)) and (event := tail.parse(line)):
                    try:
                        self.add(event)
                    except Exception:  # noqa: BLE001 - whatever an object that is no event raises
                        tail.reject(line)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in the next event; raises if a number that the page computes with is none."""
        if event["job_id"] != self.job_id:
            self.begin(str(event["job_id"]), self.progress)
            self.first = event["id"]
        self.id = event["id"]
        match event["type"]:
            case "training.status" if "progress" in event:
                self.status = str(event["data"]["status"])
                self.progress = self.progress | progress_of(event["progress"])  # some come without metrics
                self.message = str(event.get("message", self.message))
            case "lifecycle.stage":
                stage = {name: str(event["stage"][name]) for name in ("key", "label", "status")}
                done = event["stage"]["progress"]
                self.stages[stage["key"] or stage["label"]] = {
                    **stage, "progress": done and progress_of(done), "message": str(event.get("message", ""))
                }  # fmt: skip
                if stage["status"] != "running":
                    self.growing.clear()  # also of previews that were cut short
            case "validation.image":
                self.growing[shot_of(event)] = growing_preview(event)
            case "training.validation":
                self.growing.pop(shot_of(event), None)
            # Warnings, and the answer to a button. Other notices repeat the message of the run.
            case "notification" if event["severity"] == "warning" or str(event["message"]).startswith(STOPS_LATER):
                self.notices = [*self.notices, str(event["message"])][-NOTICES:]


def is_step(line: bytes) -> bool:
    """Whether a line holds progress of the steps and nothing else."""
    return STEP_STATUS in line and MESSAGE not in line


def progress_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The progress in an event."""
    numbers = {name: given[name] and given[name] + 0 for name in ("total", "percent", "eta_seconds")}
    metrics = {"metrics": dict(given["metrics"])} if "metrics" in given else {}
    return {**given, "current": given["current"] + 0, **numbers, **metrics}


def growing_preview(event: Mapping[str, Any]) -> dict[str, Any]:
    """The unfinished preview of an event."""
    data, path = event["data"], (event["images"] or [event["videos"][0]["src"]])[0]
    width, height = map(int, data["resolution"])
    named = {name: str(data[name]) for name in ("name", "step_label")}
    return {**named, "path": str(path), "width": width, "height": height}


def shot_of(event: Mapping[str, Any]) -> tuple[str, str, int]:
    """Which preview an event is about."""
    data = event["data"]
    return str(data["name"]), str(data["validation_type"]), int(data["index"])


@dataclass(eq=False)
class Run:
    """One output folder.

    Attributes:
        id: its name in addresses.
        may_start: whether this server starts runs.
        written_by: the config of the project that writes into it; empty without one.
        child: the process that this server started for it.
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
        """The metrics of all steps, as of now."""
        return record_in(self.folder).read()[0]

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The newest events."""
        return read_events(self.folder / EVENTS_FILE, self.read().id - RECENT)

    @property
    def name(self) -> str:
        """The name of the folder; what is not UTF-8 in it is replaced."""
        return as_text(self.folder.name)

    @property
    def started(self) -> Mapping[str, Any]:
        """What the page started last: `config`, `settings`, and `after`, the last event before; else empty."""
        return result_of(read_json(self.folder / STARTED_FILE, dict)) or {}

    @property
    def config(self) -> str:
        """The config that it is started with; empty if unknown."""
        return str(self.started.get("config", self.written_by))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that it is started with besides the config."""
        settings = self.started.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def owner(self) -> Owner | None:
        """The owner of the folder's lock.

        Raises:
            UserError: the lock is damaged.
        """
        path = self.folder / LOCK_FILE
        with suppress(FileNotFoundError):  # released meanwhile
            return read_owner(path, path.read_bytes()) if path.is_file() else None
        return None

    @property
    def pid(self) -> int | None:
        """The process that is at work in the folder, if it is one of this machine."""
        if self.child is not None and self.child.poll() is None:
            return self.child.pid
        try:
            owner = self.owner
        except (OSError, UserError):
            return None
        return owner.pid if owner and owner.host == socket.gethostname() and not owner.is_gone else None

    @property
    def seen(self) -> float:
        """When the run last wrote to its folder, in seconds since 1970; 0 if it has not."""
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
        """The state of the run, a sentence about it, and its newest session."""
        # Before its events: a run that ends meanwhile was alive, or has reported its end.
        owner, is_alive = self.owner, self.pid is not None
        story = self.read()
        # Which session spoke is seen from the number of the last event before it; clocks may be set meanwhile.
        after, before = self.started.get("after"), owner.after if owner else -1
        is_silent, is_on_console = story.id == after, after in (story.id, story.first - 1)
        said = said_at_the_end(self.console, only_errors=not is_silent) if is_on_console and not is_alive else ""
        if is_silent or story.id <= before:
            story = Story(progress=story.progress)
        return *self._judge(owner, is_alive, story, said), story

    def _judge(self, owner: Owner | None, is_alive: bool, story: Story, said: str) -> tuple[Status, str]:
        is_elsewhere = owner is not None and owner.host != socket.gethostname()
        # An end that was reported counts more than the process, which may take a while to exit.
        if story.status in ENDED:
            return ENDED[story.status], story.message
        if is_alive or (is_elsewhere and time.time() - self.seen < SILENCE):
            where = f"On {owner.host}. " if owner and is_elsewhere else ""
            return "running" if story.status in IN_LOOP else "starting", where + story.message
        if is_elsewhere:
            return "interrupted", f"No heartbeat for {clock(time.time() - self.seen)}. {owner}"
        return self._judge_end(owner is not None or story.status in ("starting", *IN_LOOP), said)

    def _judge_end(self, was_at_work: bool, last: str) -> tuple[Status, str]:
        """The state of a session that did not report its end; `last` are its last lines on the console."""
        if last:
            return ("cancelled", INTERRUPTED[0]) if last in INTERRUPTED else ("error", last)
        step = last_step(self.folder / METRICS_FILE)[0].get("step", 0)
        if was_at_work:
            return "interrupted", f"Ended unexpectedly {f'at step {step:,}' if step else 'before the first step'}."
        if not step:
            return "idle", ""
        if step == (result_step(self.folder, "lora") or result_step(self.folder, "full")):
            return "completed", f"{step:,} steps are done."
        return "cancelled", f"Stopped at step {step:,}."

    def status(self) -> dict[str, Any]:
        """Everything that `GET /api/training/status` answers. It never fails: a run must not hide the others."""
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
            json.dumps(known, allow_nan=False, ensure_ascii=False).encode()  # NaN or half a character cannot be sent
        except Exception as error:  # noqa: BLE001 - whatever its files hold
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
            | dict.fromkeys(("save", "preview", "stop_at_epoch_end"), in_loop)
            | {"stop": stop}
            | ({} if is_active else self._beginnings(step)),
        }

    def _idleness(self, state: Status, story: Story) -> str:
        """Why a living process makes no progress; empty if it does, or if this machine cannot tell."""
        owner = self.owner if state in ACTIVE else None
        if owner is None or owner.host != socket.gethostname() or owner.is_gone:
            return ""
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(owner.pid).status() == psutil.STATUS_STOPPED:
                return f"Process {owner.pid} is stopped. To let it go on: kill -CONT {owner.pid}"
        told = (self.folder / EVENTS_FILE).stat().st_mtime if story.id else 0.0
        silence = time.time() - max(told, owner.since)
        pace = story.progress.get("metrics", {}).get("seconds_per_step") or 0.0
        return f"Nothing new for {clock(silence)}." if silence > max(QUIET, 3 * pace) else ""

    def _beginnings(self, step: int) -> dict[str, bool]:
        """Which sessions can begin when none is at work."""
        is_free = self.may_start and bool(self.config) and self.pid is None
        has_lora = (self.folder / LORA_FILE).is_file()
        return {"start": is_free and not step, "continue": is_free and step > 0, "new": is_free and has_lora}


def advanced(progress: dict[str, Any], last: Mapping[str, Any], *, goes_on: bool) -> dict[str, Any]:
    """The progress in the events, updated with the last row of the record.

    Events of fast steps are throttled. The record has every step, so it shows how far a killed run got.
    """
    current = last.get("step", progress["current"])
    percent = progress["total"] and round(100 * current / progress["total"], 1)
    left = progress["eta_seconds"] if goes_on else None
    return {
        **progress, "current": current, "percent": percent, "eta_seconds": left, "metrics": progress["metrics"] | last
    }  # fmt: skip


def requested(folder: Path) -> list[str]:
    """The requests that a run has not taken yet."""
    return [request for request in REQUESTS if (folder / request).exists()]


def over(stages: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The stages of a run that has ended."""
    cut_short = {key: {**stage, "status": "failed"} for key, stage in stages.items() if stage["status"] == "running"}
    return {**stages, **cut_short}


def printed(file: Path) -> str:
    """The end of a command's output, without secrets and overwritten progress bars."""
    lines = b"".join(ending(file, CONSOLE_PART)).decode(errors="replace").split("\n")
    return redact("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))


def said_at_the_end(console: str, *, only_errors: bool = False) -> str:
    """The errors of the newest session in a console.log, else its last line."""
    lines = re.split(rf"^{re.escape(PROMPT)}.*$", console, flags=re.MULTILINE)[-1].strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "\n".join(errors or ([] if only_errors else lines[-1:]))


def as_text(path: str | Path) -> str:
    """A path as text; bytes that are not UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")
