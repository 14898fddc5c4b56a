"""The events of a run as JSON payloads, and their log `events.jsonl` in the output folder.

Webhooks, the web page and other programs read these payloads; docs/WEBHOOKS.md describes them.
Pictures and clips are paths relative to the output folder.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from weakref import finalize

from simpletuner.annexes.figures import Pace, ending, line_of
from simpletuner.atomic import write_fully, writing_to
from simpletuner.errors import WriteError
from simpletuner.redaction import redact_texts
from simpletuner.reporting import events, metrics

Payload = dict[str, Any]

EVENTS_FILE = "events.jsonl"
RESERVE = 1 << 16  # bytes on the disk that are kept for the end of a run
# Names of run states in payloads, where they differ.
STATUS: Mapping[events.RunState, str] = {"finished": "completed", "interrupted": "cancelled"}
SEVERITY: Mapping[events.RunState, str] = {
    "finished": "success",
    "failed": "error",
    "interrupted": "warning",
}


@dataclass
class Payloads:
    """Converts an event to its payloads, without secrets; progress is throttled.

    Attributes:
        every: minimum seconds between payloads about steps, and between payloads about the progress
            of a phase; the first and the last are always sent.
        job_id: SIMPLETUNER_JOB_ID, or a random id of this session.
    """

    every: float = 1.0
    job_id: str = field(
        default_factory=lambda: os.environ.get("SIMPLETUNER_JOB_ID") or uuid.uuid4().hex[:12]
    )
    now: Callable[[], float] = time.monotonic
    _pace: Pace | None = field(default=None, init=False)
    _sent: dict[object, float] = field(default_factory=dict, init=False)
    _began: dict[events.PhaseStarted, float] = field(default_factory=dict, init=False)

    def __call__(self, event: events.Event) -> list[Payload]:
        """The payloads of an event, in order; often empty."""
        if self._pace is not None:
            self._pace.note(event)
        elif isinstance(event, events.StateChanged) and event.state == "running":
            self._pace = Pace.of(event)
        common = {
            "severity": "info",
            "job_id": self.job_id,
            "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        payloads = []
        for payload in self._payloads(event):
            payloads.append(redact_texts(_finite({**common, **payload})))
        return payloads

    def _payloads(self, event: events.Event) -> Iterator[Payload]:
        match event:
            case events.PhaseStarted() | events.PhaseAdvanced() | events.PhaseEnded():
                yield from self._phase(event)
            case events.StepReport():
                yield from self._step(event)
            case events.StateChanged():
                yield from self._state(event)
            case events.Evaluated():
                losses = dict(event.losses)
                yield {
                    "type": "training.metric",
                    "message": line_of(event),
                    "data": {"step": event.step, **losses},
                }
            case events.MediaRendered():
                message = f"Validation: {event.media.short_name}"
                yield {"type": "training.validation", "message": message, **_preview(event.media)}
            case events.PreviewGrew():
                yield _growing_preview(event)
            case events.CheckpointSaved():
                yield from self._checkpoint(event)
            case events.Uploaded():
                status = _status("model_available", event.step)
                yield {
                    **status,
                    "message": line_of(event),
                    "data": {**status["data"], "url": event.url},
                }
            case events.Notice():
                severity = "warning" if event.warning else "info"
                yield {"type": "notification", "severity": severity, "message": event.text}

    def _checkpoint(self, event: events.CheckpointSaved) -> Iterator[Payload]:
        is_final = self._pace is not None and event.step >= self._pace.total_steps
        checkpoint = {
            "path": event.path.name,
            "label": f"Step {event.step}",
            "is_final": is_final,
        }
        title = line_of(event)
        yield {"type": "training.checkpoint", "title": title, "checkpoint": checkpoint}
        yield _lifecycle("checkpoint_save", "Saving a checkpoint", "completed", title)

    def _step(self, event: events.StepReport) -> Iterator[Payload]:
        if self._pace is None:
            return
        is_due = self._is_due(events.StepReport)
        if is_due or self._pace.is_complete:
            yield {**_status("running", event.step), "progress": _training_progress(self._pace)}

    def _is_due(self, kind: object) -> bool:
        """Whether progress of a kind is due; if so, records it as sent."""
        if self.now() - self._sent.get(kind, -math.inf) < self.every:
            return False
        self._sent[kind] = self.now()
        return True

    def _phase(
        self, event: events.PhaseStarted | events.PhaseAdvanced | events.PhaseEnded
    ) -> Iterator[Payload]:
        if isinstance(event, events.PhaseStarted):
            self._began[event] = self.now()
            if event.kind == events.UPLOADING:
                step = self._pace.step if self._pace else 0
                yield {**_status("uploading_model", step), "message": event.title}
            yield _phase_payload(event, 0, None, "running", event.title)
        elif isinstance(event, events.PhaseEnded):
            del self._began[event.phase]
            self._sent.pop(event.phase, None)
            status = "completed" if event.complete else "failed"
            message = f"{event.phase.title}: {ending(event)}"
            yield _phase_payload(event.phase, event.done, 0.0, status, message)
        elif self._is_due(event.phase):
            spent = self.now() - self._began[event.phase]
            remaining = (event.phase.total or 0) - event.done
            eta = None
            if event.done and remaining >= 0:
                eta = spent / event.done * remaining
            message = event.note or event.phase.title
            yield _phase_payload(event.phase, event.done, eta, "running", message)

    def _state(self, event: events.StateChanged) -> Iterator[Payload]:
        state = event.state
        message = event.message
        severity = SEVERITY.get(event.state, "info")
        progress = _progress("Training", event.step, event.total_steps)
        if self._pace:
            progress = _training_progress(self._pace)
        status = _status(STATUS.get(state, state), event.step)
        yield {**status, "severity": severity, "message": message, "progress": progress}
        if state == "finished":
            yield _lifecycle("training_complete", "Done", "completed", message, severity)
        elif state in events.ENDED:
            yield _lifecycle("training_abort", "Ended early", "failed", message, severity)
        if state == "failed":
            yield {"type": "error", "severity": severity, "title": "Error", "message": message}


def _status(status: str, step: int) -> Payload:
    return {
        "type": "training.status",
        "title": status.title(),
        "data": {"status": status, "step": step},
    }


def _training_progress(pace: Pace) -> Payload:
    """The progress of training, with its metrics."""
    if pace.last is None:
        eta = pace.remaining_seconds or None  # 0 if the duration of a step is not known
        return {**_progress("Training", pace.step, pace.total_steps, eta), "metrics": {}}
    progress = _progress("Training", pace.step, pace.total_steps, pace.remaining_seconds)
    metrics = {"loss": pace.last.loss, "epoch": pace.last.epoch, **pace.live, **pace.last.metrics}
    return {**progress, "metrics": metrics}


def _progress(label: str, current: int, total: int | None, eta: float | None = None) -> Payload:
    """Progress as a payload; `eta` are the remaining seconds."""
    return {
        "label": label,
        "current": current,
        "total": total,
        "percent": round(100 * current / total, 1) if total else None,
        "eta_seconds": None if eta is None else round(eta, 1),
    }


def _phase_payload(
    phase: events.PhaseStarted, done: int, eta: float | None, status: str, message: str
) -> Payload:
    """The state of a phase as a stage of the run."""
    key = phase.stage or phase.kind
    progress = _progress(phase.title, done, phase.total, eta)
    return _lifecycle(key, phase.title, status, message, progress=progress)


def _lifecycle(
    key: str,
    label: str,
    status: str,
    message: str,
    severity: str = "info",
    progress: Payload | None = None,
) -> Payload:
    """A stage of the run."""
    return {
        "type": "lifecycle.stage",
        "severity": severity,
        "title": message.partition("\n")[0],
        "stage": {"key": key, "label": label, "status": status, "progress": progress},
        "message": message,
    }


def _growing_preview(event: events.PreviewGrew) -> Payload:
    """A preview that is being sampled."""
    label = f"{event.done}/{event.total}"
    message = f"Validation (step {label}): {event.media.short_name}"
    preview = _preview(event.media)
    preview["data"] |= {"step": event.done, "timestep": event.timestep, "step_label": label}
    return {"type": "validation.image", "title": message, "message": message, **preview}


def _preview(media: metrics.MediaRecord) -> Payload:
    """The fields common to finished and growing previews."""
    suffix = Path(media.path).suffix.lower()
    is_moving = media.is_video or suffix == ".gif"
    video = {"src": media.path, "mime_type": metrics.VIDEO_MIME.get(suffix, "image/gif")}
    data = {
        "global_step": media.step,
        "resolution": [media.width, media.height],
        "validation_type": "ema" if media.ema else "trained",
        "prompt": media.prompt,
        "name": media.short_name,
        "index": media.index,
    }
    return {
        "body": media.prompt,
        "data": data,
        "images": [] if is_moving else [media.path],
        "videos": [video] if is_moving else [],
    }


def _finite(payload: Payload) -> Payload:
    """The payload with null for NaN and infinity, which JSON cannot represent."""
    # They may be nested; `json.dumps` writes them by name, and `parse_constant` reads the names.
    finite: Payload = json.loads(json.dumps(payload), parse_constant=lambda name: None)
    return finite


class EventLog:
    """Subscriber that appends every payload to `events.jsonl`.

    Payloads have an `id` that grows by 1, also across restarts. The file's modification time is a
    sign of life. A line left incomplete by a kill is dropped at the next start. On a disk that
    fills up, the end of the run is still written, into space that was taken at its start.
    """

    def __init__(self, folder: Path, payloads: Payloads) -> None:
        self.path = folder / EVENTS_FILE
        self._payloads = payloads
        with (
            writing_to(self.path),
            TemporaryFile(dir=folder, buffering=0) as reserve,
            self.path.open("ab") as file,
        ):
            # The reserve has no name, so that a kill frees it too; it is random, since file systems
            # may compress.
            reserve.write(os.urandom(RESERVE))
            self._release = finalize(self, os.close, os.dup(reserve.fileno()))
            # The first event must not be appended to an incomplete line: both would be lost.
            _, _, incomplete = b"".join(last_lines(self.path, TAIL)).rpartition(b"\n")
            file.truncate(file.tell() - len(incomplete))
        self._last = last_id(self.path)

    def __call__(self, event: events.Event) -> None:
        """Append the payloads of an event.

        Raises:
            DiskFullError, WriteError: they cannot be written. Never raised at the end of a run, of
                which later subscribers must still be notified.
        """
        lines = [self._line(payload) for payload in self._payloads(event)]
        if not lines:
            return
        is_end = isinstance(event, events.StateChanged) and event.state in events.ENDED
        if is_end:
            self._release()
        try:
            with writing_to(self.path):
                append_whole(self.path, b"".join(lines))
        except WriteError:
            if not is_end:
                raise

    def _line(self, payload: Payload) -> bytes:
        """A payload with the next id, as a line of the file."""
        self._last += 1
        event = {"id": self._last, **payload}
        return json.dumps(event, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def append_whole(path: Path, content: bytes) -> None:
    """Append to a file, all or nothing: an incomplete line would corrupt the next one.

    Raises:
        OSError: the content cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            write_fully(file, content)
        except OSError:
            file.truncate(size)
            raise


TAIL = 1 << 18  # bytes; maximum length of a line


def last_lines(path: Path, size: int) -> list[bytes]:
    """The last lines of a file within `size` bytes, including an incomplete one.

    Empty if the file does not exist.
    """
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - size)
        file.seek(start)
        lines = file.read().splitlines(keepends=True)
    if start > 0:
        del lines[:1]  # its beginning is before `start`
    return lines


def last_id(path: Path) -> int:
    """The id of the newest event in a log; 0 if there is none."""
    rows = (metrics.parse_row(line, "id") for line in last_lines(path, TAIL))
    return max((row["id"] for row in rows if row), default=0)
