"""A run as its output folder and its process show it."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpletuner.annexes.figures import Columns
from simpletuner.annexes.payloads import EVENTS_FILE, last_lines
from simpletuner.annexes.runs.console import CONSOLE_FILE, output_end
from simpletuner.annexes.runs.history import RunHistory
from simpletuner.annexes.runs.log_files import PART, Tail, record_in
from simpletuner.config.json_reader import read_json
from simpletuner.errors import Problems, UserError
from simpletuner.planning.lock import LOCK_FILE, STARTED_FILE, Owner, read_owner
from simpletuner.reporting.metrics import METRICS_FILE, parse_row

RECENT = 200  # newest events


@dataclass(eq=False)
class RunFolder:
    """The output folder of a run, and its process.

    Attributes:
        id: name in URLs.
        may_start: whether this server starts runs.
        written_by: the project's config whose output folder this is; empty if there is none.
        project: the project's folder; paths below it are shown relative to it.
        child: the process that this server started for the run.
        events: follows the log of events.
    """

    id: str
    folder: Path
    may_start: bool = True
    written_by: str = ""
    project: Path | None = None
    child: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._history = RunHistory()
        self.events = Tail(self.folder / EVENTS_FILE, "id", renew=self._history.begin)

    def read(self) -> RunHistory:
        """The newest session, up to its last event."""
        with self._lock:
            self._history.follow(self.events)
            return self._history.copy()

    @property
    def metrics(self) -> Columns:
        """The current metrics of all steps."""
        return record_in(self.folder).read()[0]

    @property
    def recent(self) -> list[dict[str, Any]]:
        """The newest events."""
        lines = last_lines(self.folder / EVENTS_FILE, PART)[-RECENT:]
        events = (parse_row(line, "id") for line in lines)
        return [event for event in events if event]

    @property
    def name(self) -> str:
        """The name of the folder; bytes that are not UTF-8 are replaced."""
        return as_text(self.folder.name)

    @property
    def shown_folder(self) -> str:
        """The folder as people write it: relative to the project's folder, if it is in there."""
        if self.project is not None and self.folder.is_relative_to(self.project):
            return as_text(self.folder.relative_to(self.project))
        return as_text(self.folder)

    @property
    def started(self) -> Mapping[str, Any]:
        """The last start from the page; empty if there was none.

        Its keys are `config`, `settings`, and `after`, the id of the last event before it.
        """
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
    def host(self) -> str:
        """The other machine that holds the folder's lock; empty if it is this one, or none."""
        with suppress(OSError, UserError):
            owner = self.owner
            if owner is not None and owner.host != socket.gethostname():
                return owner.host
        return ""

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
    def started_at(self) -> float:
        """When the present session was started, as a Unix time; now if that is unknown."""
        times = []
        with suppress(OSError):
            times.append((self.folder / STARTED_FILE).stat().st_mtime)
        with suppress(OSError, UserError):
            owner = self.owner
            if owner is not None:
                times.append(owner.since)
        return max(times, default=time.time())

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
        return output_end(self.folder / CONSOLE_FILE)


def as_text(path: str | Path) -> str:
    """A path as text; bytes that are not UTF-8 are replaced."""
    return os.fsencode(path).decode(errors="replace")
