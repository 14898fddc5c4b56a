"""The newest session of a run, as its events tell it."""

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
        """Reset the history for a new session."""
        vars(self).update(vars(RunHistory(job_id, progress=dict(progress or {}))))

    def copy(self) -> RunHistory:
        """A copy, for a thread that reads the history while another one adds to it."""
        return replace(self, stages=dict(self.stages), growing=dict(self.growing))

    def follow(self, tail: Tail) -> None:
        """Add the new events of a log."""
        while lines := tail.lines():
            for line, after in zip(lines, [*lines[1:], b""], strict=True):
                # Step events, nearly all events of a long run, are parsed only if no other step
                # event follows.
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
                self.progress = self.progress | progress_of(
                    event["progress"]
                )  # some events have no metrics
                self.message = str(event.get("message", self.message))
            case "lifecycle.stage":
                stage = {name: str(event["stage"][name]) for name in ("key", "label", "status")}
                done = event["stage"]["progress"]
                self.stages[stage["key"] or stage["label"]] = {
                    **stage,
                    "progress": done and progress_of(done),
                    "message": str(event.get("message", "")),
                }
                if stage["status"] != "running":
                    self.growing.clear()  # interrupted previews never finish
            case "validation.image":
                self.growing[shot_of(event)] = growing_preview(event)
            case "training.validation":
                self.growing.pop(shot_of(event), None)
            # Warnings and confirmed requests; other notices repeat the message of the run.
            case "notification" if event["severity"] == "warning" or str(
                event["message"]
            ).startswith(STOPS_LATER):
                self.notices = [*self.notices, str(event["message"])][-NOTICES:]


def is_step(line: bytes) -> bool:
    """Whether a line contains only step progress."""
    return STEP_STATUS in line and MESSAGE not in line


def progress_of(progress: Mapping[str, Any]) -> dict[str, Any]:
    """The progress in an event; raises a TypeError if a value is not a number."""
    numbers = {
        name: progress[name] and progress[name] + 0 for name in ("total", "percent", "eta_seconds")
    }
    metrics = {"metrics": dict(progress["metrics"])} if "metrics" in progress else {}
    return {**progress, "current": progress["current"] + 0, **numbers, **metrics}


def growing_preview(event: Mapping[str, Any]) -> dict[str, Any]:
    """The unfinished preview in an event."""
    data = event["data"]
    path = (event["images"] or [event["videos"][0]["src"]])[0]
    width, height = map(int, data["resolution"])
    named = {name: str(data[name]) for name in ("name", "step_label")}
    return {**named, "path": str(path), "width": width, "height": height}


def shot_of(event: Mapping[str, Any]) -> tuple[str, str, int]:
    """The prompt, weights and index of a preview event."""
    data = event["data"]
    return str(data["name"]), str(data["validation_type"]), int(data["index"])
