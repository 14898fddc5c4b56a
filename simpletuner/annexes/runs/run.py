"""A run as the page shows it: its state, its progress, and the buttons that work."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from simpletuner.annexes.languages.say import say
from simpletuner.annexes.payloads import EVENTS_FILE
from simpletuner.annexes.runs.folder import RunFolder, as_text
from simpletuner.annexes.runs.history import RunHistory
from simpletuner.annexes.runs.log_files import last_step
from simpletuner.annexes.runs.sentence import (
    LABELS,
    NOT_STARTED,
    Now,
    failed,
    finished,
    preparing,
    training,
)
from simpletuner.annexes.runs.state import ACTIVE, Status, Verdict, judge, saved_step
from simpletuner.distributed.requests import FOLDER, REQUESTS
from simpletuner.planning.checkpoint_folder import PIPELINE_FOLDER
from simpletuner.redaction import redact
from simpletuner.reporting.metrics import METRICS_FILE
from simpletuner.reporting.wording import clock_text
from simpletuner.weights.lora_names import LORA_FILE

BUTTONS = (
    "start",
    "continue",
    "new",
    "stop",
    "cancel",
    "save",
    "preview",
    "stop_at_epoch_end",
    "resume",
)
BETWEEN_STEPS = ("save", "preview", "stop_at_epoch_end")  # buttons that need a next step
# Seconds without events after which the page reports silence; the run may be loading a large model.
QUIET = 60.0
PAUSED = "Paused: its process was stopped from outside. Resume lets it go on."


@dataclass(eq=False)
class Run(RunFolder):
    """The run in an output folder."""

    def judge(self) -> Verdict:
        """The present state of the run.

        Raises:
            UserError: the lock of the folder is damaged.
        """
        return judge(self)

    def status(self) -> dict[str, Any]:
        """The response of `GET /api/training/status`.

        Never raises: a broken run must not hide the other ones.
        """
        blank = {
            "status": "idle",
            "job_id": "",
            "run": self.id,
            "progress": {
                "current": 0,
                "total": None,
                "percent": None,
                "eta_seconds": None,
                "metrics": {},
            },
            "stages": {},
            "config": {"name": self.written_by, "output_dir": as_text(self.folder)},
            "message": "",
            "label": say(LABELS["idle"]),
            "stage": "",
            "sentence": say(NOT_STARTED),
            "notice": "",
            "can": dict.fromkeys(BUTTONS, False) | {"cancel": self.pid is not None},
            "asked": [],
        }
        try:
            status = self._status(blank)
            # The response is JSON: this fails for NaN and lone surrogates.
            json.dumps(status, allow_nan=False, ensure_ascii=False).encode()
        except Exception as error:  # noqa: BLE001 - damaged files may raise any error
            message = redact(str(error) or type(error).__name__)
            named = {"label": say(LABELS["broken"]), "sentence": say("Its files are damaged.")}
            return blank | {"status": "broken", "message": message, **named}
        return status

    def _status(self, blank: dict[str, Any]) -> dict[str, Any]:
        """The status, in which `blank` has the keys and their values of a run without files."""
        verdict = self.judge()
        history = verdict.history
        last, damage_of_record = last_step(self.folder / METRICS_FILE)
        damage = self.events.damage or damage_of_record
        is_active = verdict.status in ACTIVE
        status = verdict.status
        message = verdict.message
        if damage and not is_active:
            status = "broken"
            message = "\n".join(filter(None, (damage, message)))
        is_paused = is_active and self._is_paused()
        idle = say(PAUSED) if is_paused else self._why_idle(status, history)
        goes_on = status == "running" and not idle
        progress = advanced(blank["progress"] | history.progress, last, goes_on=goes_on)
        in_loop = status == "running" and history.status == "running"
        asked = requested(self.folder / FOLDER) if in_loop else []
        notice = idle
        if not idle and "stop" in asked:
            notice = say("Stops after this step and its previews.")
        message = notice or redact(message)
        can = dict(blank["can"])
        can |= self._requests(history, progress, asked, in_loop=in_loop, is_active=is_active)
        if is_paused:
            can |= dict.fromkeys(("stop", *BETWEEN_STEPS), False) | {"resume": True}
        if not is_active:
            can |= self._starts(last.get("step", 0))
        return blank | {
            "status": status,
            "job_id": history.job_id,
            "progress": progress,
            "stages": history.stages if is_active else ended_stages(history.stages),
            "config": blank["config"] | {"name": self.config},
            "message": message,
            **self._words(status, history, progress, message, is_paused=is_paused),
            "notice": "" if is_paused else notice,
            "asked": asked,
            "can": can,
        }

    def _requests(
        self,
        history: RunHistory,
        progress: Mapping[str, Any],
        asked: list[str],
        *,
        in_loop: bool,
        is_active: bool,
    ) -> dict[str, bool]:
        """Which requests a run can still follow."""
        total = progress["total"]
        has_next_step = in_loop and (total is None or progress["current"] < total)
        can_stop = is_active and history.status != "stopping" and "stop" not in asked
        return dict.fromkeys(BETWEEN_STEPS, has_next_step) | {"stop": can_stop}

    def _why_idle(self, status: Status, history: RunHistory) -> str:
        """Why a running process makes no progress; empty if it does, or runs on another machine."""
        owner = self.owner if status in ACTIVE else None
        if owner is None or not owner.lives_here:
            return ""
        last_event_at = 0.0
        if history.id:
            last_event_at = (self.folder / EVENTS_FILE).stat().st_mtime
        silence = time.time() - max(last_event_at, owner.since)
        seconds_per_step = history.progress.get("metrics", {}).get("seconds_per_step") or 0.0
        if silence <= max(QUIET, 3 * seconds_per_step):
            return ""
        return say("No events for {time}. Its process is alive.", time=clock_text(silence))

    def _is_paused(self) -> bool:
        """Whether the process was stopped from outside, and so waits for SIGCONT."""
        pid = self.pid
        if pid is None:
            return False
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        return False

    def _words(
        self,
        status: Status,
        history: RunHistory,
        progress: Mapping[str, Any],
        message: str,
        *,
        is_paused: bool,
    ) -> dict[str, str]:
        """The state, the stage and the sentence about them, for people."""
        label = say(LABELS[status])
        if status in ACTIVE:
            now = self.now(status, history, progress)
            if is_paused:
                return {"label": say("paused"), "stage": now.stage, "sentence": message}
            sentence = now.sentence
            if self.host:
                sentence = say("On {host}: {sentence}", host=self.host, sentence=sentence)
            return {"label": label, "stage": now.stage, "sentence": sentence}
        step = progress["current"]
        if status == "cancelled" and step and saved_step(self) >= step:
            label = say("stopped at {step}, can continue", step=f"{step:,}")
        sentence = message.partition("\n")[0]
        if status == "completed":
            sentence = finished(step, history, self.verified)
        elif status == "error":
            sentence = failed(step)
        elif status == "idle":
            sentence = say(NOT_STARTED)
        return {"label": label, "stage": "", "sentence": sentence}

    @property
    def verified(self) -> str:
        """What a finished run has verified: its `file`, its `pipeline`; empty if it is gone."""
        if (self.folder / LORA_FILE).is_file():
            return "file"
        return "pipeline" if (self.folder / PIPELINE_FOLDER).is_dir() else ""

    def now(self, status: Status, history: RunHistory, progress: Mapping[str, Any]) -> Now:
        """What an active run does now."""
        clock = time.time()
        if status == "running":
            return training(history, progress, clock)
        return preparing(history, self.started_at, clock)

    def _starts(self, step: int) -> dict[str, bool]:
        """Which kinds of sessions can start while none is active."""
        is_free = self.may_start and bool(self.config) and self.pid is None
        has_lora = (self.folder / LORA_FILE).is_file()
        return {
            "start": is_free and not step,
            "continue": is_free and step > 0,
            "new": is_free and has_lora,
        }


def advanced(progress: dict[str, Any], last: Mapping[str, Any], *, goes_on: bool) -> dict[str, Any]:
    """The progress from events, updated with the last row of the record.

    Events of fast steps are throttled. The record has every step, so it shows how far a killed run
    got.
    """
    current = last.get("step", progress["current"])
    total = progress["total"]  # None if the length is unknown
    percent = total and round(100 * current / total, 1)
    return {
        **progress,
        "current": current,
        "percent": percent,
        "eta_seconds": progress["eta_seconds"] if goes_on else None,
        "metrics": progress["metrics"] | last,
    }


def requested(folder: Path) -> list[str]:
    """The requests that a run has not processed yet."""
    return [request for request in REQUESTS if (folder / request).exists()]


def ended_stages(stages: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The stages of a run that has ended; running ones have failed."""
    ended = dict(stages)
    for key, stage in stages.items():
        if stage["status"] == "running":
            ended[key] = {**stage, "status": "failed"}
    return ended
