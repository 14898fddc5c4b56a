"""The newest session of a run, as its events report it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from simpletuner.annexes.runs.log_files import Tail

NOTICES = 100  # kept texts of notices
STEP_STATUS = b'"type": "training.status"'
MESSAGE = b'"message"'
STOPS_LATER = "The run will stop at the end of"  # prefix of the notice that confirms that request


@dataclass
class RunHistory:
    """The newest session of a run, according to its events.

    Attributes:
        first: id of the first event.
        id: id of the last event.
        status: status of the last `training.status` with progress; empty before the first.
        summary: the lines that announced it, about its model, files and length.
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
    summary: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    growing: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)

    def begin(self, job_id: str = "", progress: Mapping[str, Any] | None = None) -> None:
        """Reset the history for a new session."""
        vars(self).update(vars(RunHistory(job_id, progress=dict(progress or {}))))

    def copy(self) -> RunHistory:
        """A copy, for a thread that reads the history while another one adds to it."""
        return replace(self, stages=dict(self.stages), growing=dict(self.growing))

    def follow(self, tail: Tail) -> None:
        """Add the new events of a log."""
        while lines := tail.lines():
            for line, next_line in zip(lines, [*lines[1:], b""], strict=True):
                # Nearly all events of a long run are steps: only the last of a row is parsed.
                if is_step(line) and is_step(next_line):
                    continue
                event = tail.parse(line)
                if event is None:
                    continue
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
                # Merged, since some events have no metrics.
                self.progress = self.progress | progress_of(event["progress"])
                self.message = str(event.get("message", self.message))
                if self.status == "starting":
                    self.summary = self.message
            case "lifecycle.stage":
                stage = {name: str(event["stage"][name]) for name in ("key", "label", "status")}
                progress = event["stage"]["progress"]
                self.stages[stage["key"] or stage["label"]] = {
                    **stage,
                    "progress": progress and progress_of(progress),
                    "message": str(event.get("message", "")),
                }
                if stage["status"] != "running":
                    self.growing.clear()  # interrupted previews never finish
            case "validation.image":
                self.growing[shot_of(event)] = growing_preview(event)
            case "training.validation":
                self.growing.pop(shot_of(event), None)
            case "notification":
                message = str(event["message"])
                # Other notices repeat the message of the run.
                if event["severity"] == "warning" or message.startswith(STOPS_LATER):
                    self.notices = [*self.notices, message][-NOTICES:]


def is_step(line: bytes) -> bool:
    """Whether a line contains only step progress."""
    return STEP_STATUS in line and MESSAGE not in line


def progress_of(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The progress in an event.

    Raises:
        TypeError: a value is not a number.
    """
    # Adding 0 raises for anything else.
    checked = {**progress, "current": progress["current"] + 0}
    for name in ("total", "percent", "eta_seconds"):  # may be None
        checked[name] = progress[name] and progress[name] + 0
    if "metrics" in progress:
        checked["metrics"] = dict(progress["metrics"])
    return checked


def growing_preview(event: Mapping[str, Any]) -> dict[str, Any]:
    """The unfinished preview in an event."""
    data = event["data"]
    path = event["images"][0] if event["images"] else event["videos"][0]["src"]
    width, height = map(int, data["resolution"])
    return {
        "name": str(data["name"]),
        "step_label": str(data["step_label"]),
        "path": str(path),
        "width": width,
        "height": height,
    }


def shot_of(event: Mapping[str, Any]) -> tuple[str, str, int]:
    """The prompt, weights and index of a preview event."""
    data = event["data"]
    return str(data["name"]), str(data["validation_type"]), int(data["index"])
