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
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from simpletuner.annexes.page.story import Story, Tail, follow, near_end
from simpletuner.config.json_files import read_json
from simpletuner.distributed.requests import FOLDER as REQUESTS
from simpletuner.errors import UserError
from simpletuner.models.lora_keys import LORA_FILE
from simpletuner.redaction import redact
from simpletuner.reporting.metrics import METRICS_FILE, Columns
from simpletuner.reporting.pace import clock
from simpletuner.reporting.payloads import EVENTS_FILE, read_events
from simpletuner.run.lock import LOCK_FILE, Owner, read_owner
from simpletuner.training.manifest import result_step

Status = Literal["idle", "starting", "running", "completed", "error", "cancelled", "interrupted", "broken"]
CONSOLE_FILE = "console.log"
PROMPT = "$ simpletuner "  # begins the line of console.log that names the command of a session
STARTED_FILE = "started.json"  # what the page started last: which config, with which settings, after which event
END = 1 << 16  # bytes
RECENT = 200
INTERRUPTED = ("Interrupted.", "KeyboardInterrupt")  # ends the console; the second, while Python itself was starting
BUTTONS = ("start", "continue", "new", "stop", "cancel", "save", "preview", "stop_at_epoch_end")
ACTIVE = ("starting", "running")
IN_LOOP = ("running", "stopping")
ENDED: Mapping[str, Status] = {"completed": "completed", "failed": "error", "cancelled": "cancelled"}
# Seconds without a sign of life after which a run on another machine, which cannot be asked, counts as ended.
SILENCE = 900.0


class Record:
    """The metrics of a run, as of now; only what is new is read."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._tail = Tail(path, "step", renew=self._begin)
        self._columns = Columns()

    def _begin(self) -> None:
        self._columns = Columns()

    def read(self) -> tuple[Columns, str]:
        """The metrics of all steps, and which line of the file cannot be used."""
        with self._lock:
            for row in self._tail.rows():
                self._columns.add(row)
            return self._columns, self._tail.damage


# The columns of 100,000 steps take some 15 MB; those of runs that nobody looks at are dropped.
record_in = lru_cache(maxsize=3)(lambda folder: Record(folder / METRICS_FILE))


@dataclass(eq=False)
class Run:
    """One output folder.

    Attributes:
        id: its name in addresses.
        may_start: whether this server starts runs.
        written_by: the config of the project that writes into it; empty if there is none.
        child: the process that this server started for it.
    """

    id: str
    folder: Path
    may_start: bool = True
    written_by: str = ""
    child: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._story, self._last = Story(), dict[str, Any]()
        self._events = Tail(self.folder / EVENTS_FILE, "id", renew=self._story.begin)
        self._rows = Tail(self.folder / METRICS_FILE, "step", near_end, self._last.clear)

    def read(self) -> tuple[Story, dict[str, Any]]:
        """What the events tell, and the metrics of the last step, as of now."""
        with self._lock:
            follow(self._events, self._story)
            for row in self._rows.rows():
                if row["step"] != self._last.get("step"):
                    self._last.clear()
                self._last.update(row)
            return self._story.copy(), dict(self._last)

    @property
    def damage(self) -> str:
        """A line of its record or events that cannot be used, as of the last look; empty if there is none."""
        return self._events.damage or self._rows.damage

    @property
    def metrics(self) -> Columns:
        """The metrics of all steps, as of now."""
        return record_in(self.folder).read()[0]

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The newest events."""
        return read_events(self.folder / EVENTS_FILE, self.read()[0].id - RECENT)

    @property
    def name(self) -> str:
        """The name of the folder; what is not UTF-8 in it is replaced."""
        return shown(self.folder.name)

    @property
    def started(self) -> Mapping[str, Any]:
        """What the page started last: `config`, `settings`, and `after`, the last event before; else empty."""
        path = self.folder / STARTED_FILE
        found = read_json(path, []) if path.is_file() else None
        return found if isinstance(found, dict) else {}

    @property
    def config(self) -> str:
        """The config that it is started with; empty if that is not known."""
        return str(self.started.get("config", self.written_by))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that it is started with besides the config."""
        found = self.started.get("settings")
        return found if isinstance(found, dict) else {}

    @property
    def owner(self) -> Owner | None:
        """Whose lock is in the folder.

        Raises:
            UserError: it does not say so.
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
        """When something in the folder last changed, in seconds since 1970; 0 if there is nothing."""
        times = [0.0]
        for name in (EVENTS_FILE, METRICS_FILE, LOCK_FILE, CONSOLE_FILE):
            with suppress(OSError):
                times.append((self.folder / name).stat().st_mtime)
        return max(times)

    @property
    def console(self) -> str:
        """The end of console.log, without secrets and overwritten progress bars."""
        path = self.folder / CONSOLE_FILE
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - END))
            lines = file.read().decode(errors="replace").split("\n")[1 if size > END else 0 :]
        return redact("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))

    def judge(self) -> tuple[Status, str, Story]:
        """The state of the run, a sentence about it, and what its newest session has told."""
        # Before its events: a run that ends meanwhile was alive, or has told how it ended.
        owner, is_alive = self.owner, self.pid is not None
        story, last = self.read()
        # Which session spoke is seen from the number of the last event before it; clocks may be set meanwhile.
        is_silent, before = story.id == self.started.get("after"), owner.after if owner else -1
        if is_silent or story.id <= before:
            story = Story(progress=story.progress)
        state, message = self._judge(owner, is_alive, story, last.get("step", 0), self.console if is_silent else "")
        return state, message, story

    def _judge(self, owner: Owner | None, is_alive: bool, story: Story, step: int, console: str) -> tuple[Status, str]:
        is_elsewhere = owner is not None and owner.host != socket.gethostname()
        if story.status in ENDED:
            return ENDED[story.status], story.message
        if is_alive or (is_elsewhere and time.time() - self.seen < SILENCE):
            where = f"On {owner.host}. " if owner and is_elsewhere else ""
            return "running" if story.status in IN_LOOP else "starting", where + story.message
        if is_elsewhere:
            return "interrupted", f"No sign of life for {clock(time.time() - self.seen)}. {owner}"
        if last := said_at_the_end(console):
            return ("cancelled", INTERRUPTED[0]) if last in INTERRUPTED else ("error", last)
        if owner is not None or story.status in ("starting", *IN_LOOP):
            return "interrupted", f"Ended unexpectedly at step {step:,}."
        if not step:
            return "idle", ""
        if step == (result_step(self.folder, "lora") or result_step(self.folder, "full")):
            return "completed", f"{step:,} steps are done."
        return "cancelled", f"Stopped at step {step:,}."

    def status(self) -> dict[str, Any]:
        """Everything that `GET /api/training/status` answers. It never fails: a run must not hide the others."""
        try:
            found = self._status()
            json.dumps(found, allow_nan=False, ensure_ascii=False).encode()  # NaN or half a character cannot be sent
        except Exception as error:  # noqa: BLE001 - whatever its files hold
            return self._blank() | {"status": "broken", "message": redact(str(error) or type(error).__name__)}
        return found

    def _blank(self) -> dict[str, Any]:
        return {
            "status": "idle",
            "job_id": "",
            "run": self.id,
            "progress": {"current": 0, "total": None, "percent": None, "eta_seconds": None, "metrics": {}},
            "stages": {},
            "config": {"name": self.written_by, "output_dir": shown(self.folder)},
            "message": "",
            "can": dict.fromkeys(BUTTONS, False) | {"cancel": self.pid is not None},
        }

    def _status(self) -> dict[str, Any]:
        (state, message, story), (_, last) = self.judge(), self.read()
        is_active, step, blank = state in ACTIVE, last.get("step", 0), self._blank()
        if self.damage and not is_active:
            state, message = "broken", "\n".join(filter(None, (self.damage, message)))
        progress = blank["progress"] | {"current": step, "metrics": last} | story.progress
        in_loop = state == "running" and story.status == "running"
        is_asked = in_loop and (self.folder / REQUESTS / "stop").exists()
        startable = self.may_start and bool(self.config) and not is_active and self.pid is None
        return blank | {
            "status": state,
            "job_id": story.job_id,
            "progress": progress if is_active else progress | {"eta_seconds": None},
            "stages": {key: stage if is_active else _over(stage) for key, stage in story.stages.items()},
            "config": blank["config"] | {"name": self.config},
            "message": "Stops after this step and its previews." if is_asked else redact(message),
            "can": blank["can"]
            | {
                "start": startable and not step,
                "continue": startable and step > 0,
                "new": startable and (self.folder / LORA_FILE).is_file(),
                "stop": is_active and story.status != "stopping" and not is_asked,
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


def shown(path: str | Path) -> str:
    """A path as text; bytes that are not UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")
