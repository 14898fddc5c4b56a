"""Files of a run that grow: their new lines, and what its events tell. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from simpletuner.redaction import redact
from simpletuner.reporting.metrics import parse_row

PART = 1 << 18  # bytes read at a time; no line is longer
NOTICES = 100
STATUS, MESSAGE = b'"type": "training.status"', b'"message"'


def near_end(file: BinaryIO) -> int:
    """Where the first of the last lines begins."""
    start = max(0, file.seek(0, os.SEEK_END) - PART)
    file.seek(start)
    return start + len(file.readline() if start else b"")


class Tail:
    """The lines that are appended to a file, each once, and never more than a part of them in memory.

    Args:
        number: the key of a whole number that their JSON objects have.
        begin: where to begin in a file, also in one that replaces it or was cut.
        renew: called before such a file is read.

    Attributes:
        damage: a complete line that is no such object; empty if there is none.
    """

    def __init__(
        self,
        path: Path,
        number: str,
        begin: Callable[[BinaryIO], int] = lambda file: 0,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.damage = path, ""
        self._number, self._begin, self._renew = number, begin, renew
        self._file, self._offset = 0, 0

    def lines(self) -> list[bytes]:
        """The next complete lines; none at the end of the file."""
        if not self.path.is_file():  # to open a pipe would wait for its writer
            if self._file:
                self._restart(0, 0)
            return []
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file or found.st_size < self._offset:
                self._restart(found.st_ino, self._begin(file))
            file.seek(self._offset)
            part = file.read(PART)
        end = part.rfind(b"\n") + 1 or (PART if len(part) == PART else 0)
        self._offset += end
        return part[:end].splitlines(keepends=True)

    def _restart(self, file: int, offset: int) -> None:
        self._file, self._offset, self.damage = file, offset, ""
        self._renew()

    def rows(self) -> Iterator[dict[str, Any]]:
        """The objects in all new lines."""
        while lines := self.lines():
            yield from filter(None, map(self.parse, lines))

    def parse(self, line: bytes) -> dict[str, Any] | None:
        """The object in a line."""
        row = parse_row(line, self._number)
        if row is None:
            self.reject(line)
        return row

    def reject(self, line: bytes) -> None:
        """Note that a line cannot be used; the first one is reported."""
        text = redact(line.decode(errors="replace").strip())
        self.damage = self.damage or f"{self.path.name} has a line that cannot be used: {text:.200}"


@dataclass
class Story:
    """What the events of a run's newest session told.

    Attributes:
        id: of the last event.
        status: of the last `training.status` with progress; empty before the first.
        stages: by key, the newest of each.
        notices: the texts of warnings.
        growing: unfinished previews by prompt, weights and index.
    """

    job_id: str = ""
    id: int = 0
    status: str = ""
    message: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    growing: dict[tuple[str, str, int], Growing] = field(default_factory=dict)

    def begin(self, job_id: str = "", progress: Mapping[str, Any] | None = None) -> None:
        """Forget everything."""
        vars(self).update(vars(Story(job_id, progress=dict(progress or {}))))

    def copy(self) -> Story:
        """The story so far, for a thread that uses it while another one adds to it."""
        return replace(self, stages=dict(self.stages), growing=dict(self.growing))

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in the next event. What the page counts with is a number, or an exception is raised."""
        if event["job_id"] != self.job_id:
            self.begin(str(event["job_id"]), self.progress)
        self.id = event["id"]
        match event["type"]:
            case "training.status" if "progress" in event:
                self.status, self.progress = str(event["data"]["status"]), progress_of(event["progress"])
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
                self.growing[_shot(event)] = Growing.of(event)
            case "training.validation":
                self.growing.pop(_shot(event), None)
        # How a run ended is in its message; other events only repeat it.
        if event["type"] == "notification" and event["severity"] == "warning":
            self.notices = [*self.notices, str(event["message"])][-NOTICES:]


def follow(tail: Tail, story: Story) -> None:
    """Tell a story the new events of its log."""
    while lines := tail.lines():
        for line, after in zip(lines, [*lines[1:], b""], strict=True):
            # Of steps, which are nearly all events of a long run, only the last counts; the others are not parsed.
            if not (is_step(line) and is_step(after)) and (event := tail.parse(line)):
                try:
                    story.add(event)
                except Exception:  # noqa: BLE001 - whatever an object that is no event raises
                    tail.reject(line)


def is_step(line: bytes) -> bool:
    """Whether a line holds progress of the steps and nothing else."""
    return STATUS in line and MESSAGE not in line


def progress_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The progress in an event."""
    others = {name: given[name] and given[name] + 0 for name in ("total", "percent", "eta_seconds")}
    return {**given, "current": given["current"] + 0, **others}


@dataclass(frozen=True)
class Growing:
    """An unfinished preview."""

    name: str
    step_label: str
    path: str
    width: int
    height: int

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Growing:
        """The preview of an event."""
        data, path = event["data"], (event["images"] or [event["videos"][0]["src"]])[0]
        width, height = map(int, data["resolution"])
        return cls(str(data["name"]), str(data["step_label"]), str(path), width, height)


def _shot(event: Mapping[str, Any]) -> tuple[str, str, int]:
    data = event["data"]
    return str(data["name"]), str(data["validation_type"]), int(data["index"])
