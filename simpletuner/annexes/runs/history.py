"""The newest session of a run, as its events report it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from simpletuner.annexes.runs.log_files import Tail

NOTICES = 100  # kept texts of notices
TURNS = 200  # kept turns of stages
STEP_STATUS = b'"type": "training.status"'
MESSAGE = b'"message"'
STOPS_LATER = "The run will stop at the end of"  # prefix of the notice that confirms that request


@dataclass(frozen=True)
class StageTurn:
    """One turn of a stage; a stage such as previews has a turn in every round.

    Attributes:
        began, ended: Unix times; `ended` is None while the turn runs.
        status: `running`, `completed` or `failed`.
        done, total: its progress; `total` is None if it counts nothing.
    """

    key: str
    label: str
    began: float
    status: str
    ended: float | None = None
    done: int = 0
    total: int | None = None

    @property
    def seconds(self) -> float | None:
        """How long it took; None while it runs, and for one that was only reported at its end."""
        if self.ended is None or self.ended <= self.began:
            return None
        return self.ended - self.began


@dataclass
class RunHistory:
    """The newest session of a run, according to its events.

    Attributes:
        first: id of the first event.
        id: id of the last event.
        began, at: Unix times of the first and of the last event.
        step_at: time of the last progress of the steps.
        start_step: the step after which the session began.
        status: status of the last `training.status` with progress; empty before the first.
        summary: the lines that announced it, about its model, files and length.
        progress: progress of the steps, with the latest metrics.
        stages: the latest state of every stage, by key.
        turns: all turns of the stages, oldest first.
        notices: texts of warnings and of confirmed requests.
        growing: unfinished previews by prompt, weights and index.
    """

    job_id: str = ""
    first: int = 0
    id: int = 0
    began: float = 0.0
    at: float = 0.0
    step_at: float = 0.0
    start_step: int = 0
    status: str = ""
    message: str = ""
    summary: str = ""
    progress: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)
    turns: list[StageTurn] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    growing: dict[tuple[str, str, int], dict[str, Any]] = field(default_factory=dict)

    def begin(self, job_id: str = "", progress: Mapping[str, Any] | None = None) -> None:
        """Reset the history for a new session."""
        vars(self).update(vars(RunHistory(job_id, progress=dict(progress or {}))))

    def copy(self) -> RunHistory:
        """A copy, for a thread that reads the history while another one adds to it."""
        return replace(
            self, stages=dict(self.stages), turns=list(self.turns), growing=dict(self.growing)
        )

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
            self.began = time_of(event)
        self.id = event["id"]
        self.at = time_of(event) or self.at
        match event["type"]:
            case "training.status" if "progress" in event:
                self._add_progress(event)
            case "lifecycle.stage":
                self._add_stage(event)
            case "validation.image":
                self.growing[shot_of(event)] = growing_preview(event)
            case "training.validation":
                self.growing.pop(shot_of(event), None)
            case "notification":
                message = str(event["message"])
                # Other notices repeat the message of the run.
                if event["severity"] == "warning" or message.startswith(STOPS_LATER):
                    self.notices = [*self.notices, message][-NOTICES:]

    def _add_progress(self, event: Mapping[str, Any]) -> None:
        if not self.status:
            self.start_step = event["progress"]["current"] + 0
        self.status = str(event["data"]["status"])
        # Merged, since some events have no metrics.
        self.progress = self.progress | progress_of(event["progress"])
        self.step_at = self.at
        self.message = str(event.get("message", self.message))
        if self.status == "starting":
            self.summary = self.message

    def _add_stage(self, event: Mapping[str, Any]) -> None:
        stage = {name: str(event["stage"][name]) for name in ("key", "label", "status")}
        progress = event["stage"]["progress"]
        key = stage["key"] or stage["label"]
        self.stages[key] = {
            **stage,
            "progress": progress and progress_of(progress),
            "message": str(event.get("message", "")),
        }
        if stage["status"] != "running":
            self.growing.clear()  # interrupted previews never finish
        self._add_turn(key, self.stages[key])

    def _add_turn(self, key: str, stage: Mapping[str, Any]) -> None:
        """Continue the running turn of a stage, or begin its next turn."""
        progress = stage["progress"] or {"current": 0, "total": None}
        counts = {"done": progress["current"], "total": progress["total"]}
        ended = None if stage["status"] == "running" else self.at
        for place in range(len(self.turns) - 1, -1, -1):
            turn = self.turns[place]
            if turn.key == key and turn.status == "running":
                self.turns[place] = replace(turn, status=stage["status"], ended=ended, **counts)
                return
        turn = StageTurn(key, stage["label"], self.at, stage["status"], ended, **counts)
        self.turns = [*self.turns, turn][-TURNS:]


def time_of(event: Mapping[str, Any]) -> float:
    """The Unix time of an event; 0 without a timestamp; raises if it is invalid."""
    if "timestamp" not in event:
        return 0.0
    return datetime.fromisoformat(str(event["timestamp"])).timestamp()


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
