"""A run, as its process and its output folder tell of it. Free of torch.

Nothing about a run is kept here that could not be read again: after a crash of the run, of the server or of the machine
the folder says what happened.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from simpletuner.config.json_files import read_json
from simpletuner.errors import UserError
from simpletuner.models.lora_keys import LORA_FILE
from simpletuner.redaction import redact
from simpletuner.reporting.metrics import METRICS_FILE
from simpletuner.reporting.pace import clock
from simpletuner.reporting.payloads import EVENTS_FILE
from simpletuner.reporting.requests import FOLDER as REQUESTS
from simpletuner.run.lock import LOCK_FILE, Owner, read_owner
from simpletuner.training.manifest import result_step

Status = Literal["idle", "starting", "running", "completed", "error", "cancelled", "interrupted"]
CONSOLE_FILE = "console.log"
PROMPT = "$ simpletuner "  # begins the line of console.log that names the command of a session
STARTED_FILE = "started.json"  # what the page started last: when, which config, with which settings
END = 1 << 16  # bytes; no line is longer
NOTICES, RECENT = 100, 200
ACTIVE = ("starting", "running")
IN_LOOP = ("running", "stopping")
ENDED: Mapping[str, Status] = {"completed": "completed", "failed": "error", "cancelled": "cancelled"}
# Seconds without a sign of life after which a run on another machine, which cannot be asked, counts as ended.
SILENCE = 900.0


class Tail:
    """JSON objects that are appended to a file, one a line, each read once; others and torn lines are left out.

    Args:
        key: which they all have.

    Attributes:
        generation: grows when the file was replaced or cut, and is read from its start again.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.key, self.generation = path, key, 0
        self._file, self._offset = 0, 0

    def skip(self) -> None:
        """Leave out what is there now."""
        with suppress(FileNotFoundError), self.path.open("rb") as file:
            self._file = os.fstat(file.fileno()).st_ino
            start = max(0, file.seek(0, os.SEEK_END) - END)
            file.seek(start)
            self._offset = start + file.read().rfind(b"\n") + 1

    def read(self) -> list[dict[str, Any]]:
        """What is new since the last call."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self._file, self._offset, self.generation = found.st_ino, 0, self.generation + 1
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return list(self._objects(complete))

    def _objects(self, content: bytes) -> Iterator[dict[str, Any]]:
        for line in content.splitlines():
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict) and self.key in found:
                    yield found


@dataclass
class Story:
    """What the events of a run's newest session told.

    Attributes:
        status: of its last `training.status`; empty before the first.
        time: of the last event, in seconds since 1970.
        stages: by key, the newest of each.
        notices: warnings.
        growing: unfinished previews by prompt, weights and index.
    """

    job_id: str = ""
    status: str = ""
    time: float = 0.0
    message: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    notices: list[dict[str, Any]] = field(default_factory=list)
    growing: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in the next event."""
        if event["job_id"] != self.job_id:
            self.__init__(event["job_id"], progress=self.progress)  # type: ignore[misc]
        self.time = datetime.fromisoformat(event["timestamp"]).timestamp()
        match event["type"]:
            case "training.status":
                self.status, self.progress = event["data"]["status"], event["progress"]
                self.message = event.get("message", self.message)
            case "lifecycle.stage":
                stage = event["stage"]
                self.stages[stage["key"] or stage["label"]] = {**stage, "message": event.get("message", "")}
                if stage["status"] != "running":
                    self.growing.clear()  # also of previews that were cut short
            case "validation.image":
                self.growing[_shot(event)] = dict(event)
            case "training.validation":
                self.growing.pop(_shot(event), None)
        # How a run ended is in its message; other events only repeat it.
        if event["type"] == "notification" and event["severity"] == "warning":
            self.notices = [*self.notices, dict(event)][-NOTICES:]


def _shot(event: Mapping[str, Any]) -> tuple[Any, ...]:
    data = event["data"]
    return data["name"], data["validation_type"], data["index"]


@dataclass(eq=False)
class Run:
    """One output folder.

    Attributes:
        id: its name in addresses.
        may_start: whether this server starts runs.
        written_by: the config of the project that writes into it; empty if there is none.
        child: the process that this server started for it.
        recent: its newest events.
    """

    id: str
    folder: Path
    may_start: bool = True
    written_by: str = ""
    child: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._events = Tail(self.folder / EVENTS_FILE, "job_id")
        self._metrics = Tail(self.folder / METRICS_FILE, "step")
        self._story, self._rows, self._generation = Story(), dict[int, dict[str, Any]](), 0
        self.recent = deque[dict[str, Any]](maxlen=RECENT)

    def read(self) -> tuple[Story, list[dict[str, Any]]]:
        """What the events tell, and the metrics of each step, as of now."""
        with self._lock:
            for event in self._events.read():
                self._story.add(event)
                self.recent.append(event)
            new = self._metrics.read()
            if self._metrics.generation != self._generation:
                self._rows, self._generation = {}, self._metrics.generation
            for row in new:
                self._rows.setdefault(row["step"], {}).update({sys.intern(key): value for key, value in row.items()})
            return self._story, list(self._rows.values())

    @property
    def started(self) -> Mapping[str, Any]:
        """What the page started last: `time` (since 1970), `config`, `settings`; empty if it was not the page."""
        found = read_json(self.folder / STARTED_FILE, [])
        return found if isinstance(found, dict) else {}

    @property
    def config(self) -> str:
        """The config that it is started with; empty if that is not known."""
        return str(self.started.get("config", self.written_by))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that it is started with besides the config."""
        return dict(self.started.get("settings", {}))

    @property
    def owner(self) -> Owner | None:
        """Whose lock is in the folder."""
        path = self.folder / LOCK_FILE
        try:
            return read_owner(path, path.read_bytes())
        except (OSError, UserError):
            return None

    @property
    def pid(self) -> int | None:
        """The process that is at work in the folder, if it is one of this machine."""
        if self.child is not None and self.child.poll() is None:
            return self.child.pid
        owner = self.owner
        return owner.pid if owner and owner.host == socket.gethostname() and not owner.is_gone else None

    @property
    def seen(self) -> float:
        """When something in the folder last changed, in seconds since 1970; 0 if there is nothing."""
        files = (self.folder / name for name in (EVENTS_FILE, METRICS_FILE, LOCK_FILE, CONSOLE_FILE))
        return max((path.stat().st_mtime for path in files if path.is_file()), default=0.0)

    @property
    def console(self) -> str:
        """The end of console.log, without secrets and overwritten progress bars."""
        try:
            with (self.folder / CONSOLE_FILE).open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - END))
                lines = file.read().decode(errors="replace").split("\n")[1 if size > END else 0 :]
        except OSError:
            return ""
        return redact("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))

    def judge(self) -> tuple[Status, str]:
        """The state of the run, and a sentence about it."""
        story, rows = self.read()
        owner, step = self.owner, rows[-1]["step"] if rows else 0
        is_elsewhere = owner is not None and owner.host != socket.gethostname()
        told = owner is None or story.time >= owner.since
        if told and story.status in ENDED and self.started.get("time", 0.0) <= story.time:
            return ENDED[story.status], story.message
        if self.pid is not None or (is_elsewhere and time.time() - self.seen < SILENCE):
            where = f"On {owner.host}. " if owner and is_elsewhere else ""
            in_loop = told and story.status in IN_LOOP
            return "running" if in_loop else "starting", where + (story.message if told else "")
        if is_elsewhere:
            return "interrupted", f"No sign of life for {clock(time.time() - self.seen)}. {owner}"
        return self._judge_ended(owner, story, step)

    def _judge_ended(self, owner: Owner | None, story: Story, step: int) -> tuple[Status, str]:
        """How a run ended whose events do not say so."""
        last = said_at_the_end(self.console)
        if self.started.get("time", 0.0) > story.time and last:  # before the first event
            return "cancelled" if last == "Interrupted." else "error", last
        if owner is not None or story.status in ("starting", *IN_LOOP):
            return "interrupted", f"Ended unexpectedly at step {step:,}."
        if not step:
            return "idle", ""
        if step == (result_step(self.folder, "lora") or result_step(self.folder, "full")):
            return "completed", f"{step:,} steps are done."
        return "cancelled", f"Stopped at step {step:,}."

    def status(self) -> dict[str, Any]:
        """Everything that `GET /api/training/status` answers."""
        (state, message), (story, rows) = self.judge(), self.read()
        last = rows[-1] if rows else {}
        is_active, step = state in ACTIVE, last.get("step", 0)
        known = {"current": step, "total": None, "percent": None, "eta_seconds": None, "metrics": last}
        progress = {**known, **story.progress} if story.progress else known
        in_loop = state == "running" and story.status == "running"
        is_asked = in_loop and (self.folder / REQUESTS / "stop").exists()
        startable = self.may_start and bool(self.config) and not is_active and self.pid is None
        return {
            "status": state,
            "job_id": story.job_id,
            "run": self.id,
            "progress": progress if is_active else {**progress, "eta_seconds": None},
            "stages": {key: stage if is_active else _over(stage) for key, stage in story.stages.items()},
            "config": {"name": self.config, "output_dir": str(self.folder)},
            "message": "Stops after this step and its previews." if is_asked else redact(message),
            "can": {
                "start": startable and not step,
                "continue": startable and step > 0,
                "new": startable and (self.folder / LORA_FILE).is_file(),
                "stop": is_active and story.status != "stopping" and not is_asked,
                "cancel": self.pid is not None,
                **dict.fromkeys(("save", "preview", "stop_at_epoch_end"), in_loop),
            },
        }


def _over(stage: dict[str, Any]) -> dict[str, Any]:
    return {**stage, "status": "failed"} if stage["status"] == "running" else stage


def said_at_the_end(console: str) -> str:
    """The errors of the newest session in a console.log, else its last line."""
    lines = re.split(rf"^{re.escape(PROMPT)}.*$", console, flags=re.MULTILINE)[-1].strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "\n".join(errors or lines[-1:])
