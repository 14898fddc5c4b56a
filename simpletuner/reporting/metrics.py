"""The record of a run: `training_metrics.jsonl` and `validation_media.jsonl`, one JSON object a line.

Both are appended and flushed line by line, so that a killed run loses at most the line it was writing. A run that
resumes at step S first drops the rows after S, because it will record those steps again.
"""

from __future__ import annotations

import errno
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from simpletuner.atomic import write_atomically, writing_to
from simpletuner.errors import WriteError

METRICS_FILE = "training_metrics.jsonl"
MEDIA_FILE = "validation_media.jsonl"
MIME = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
VIDEO_MIME = {".mp4": "video/mp4", ".webm": "video/webm"}

Value = float | int | bool | str | list[float] | None


@dataclass(frozen=True)
class MediaRecord:
    """One rendered preview.

    Attributes:
        step: optimizer step at which it was rendered; 0 is the untrained model.
        short_name: of the prompt (`unconditional`, a nickname of the library, `validation`).
        prompt: its full text.
        path: of the file, relative to output_dir, with forward slashes.
        width, height: true size in pixels.
        seed: of the initial noise.
        ema: rendered with the averaged weights.
        index: distinguishes samples of one prompt.
    """

    step: int
    short_name: str
    prompt: str
    path: str
    width: int
    height: int
    seed: int | None = None
    ema: bool = False
    index: int = 0

    @property
    def is_video(self) -> bool:
        return Path(self.path).suffix.lower() in VIDEO_MIME


class StepLines:
    """A file of JSON lines that each carry a `step`, open for appending.

    Args:
        path: created if missing.
        resume_step: lines of later steps and a torn last line are dropped first; 0 for a fresh run, which drops all.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self.path = Path(path)
        with writing_to(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        self.drop(lambda row: resume_step == 0 or row["step"] > resume_step)

    def drop(self, unwanted: Callable[[dict[str, Any]], bool]) -> None:
        """Remove the rows for which `unwanted` is true, and torn lines."""
        before = self.path.read_bytes()
        rows = ((line, parse_row(line)) for line in before.splitlines(keepends=True))
        kept = b"".join(line for line, row in rows if row is not None and not unwanted(row))
        if kept != before:
            self._file.close()
            write_atomically(self.path, kept)
            self._file = self.path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line, unbuffered: it survives a kill of the process once this returns.

        Raises:
            DiskFullError: there was no space; the torn line is dropped at the next start.
            WriteError: the file has been deleted.
        """
        if not self.path.exists():  # writing to the open file would lose every line without an error
            raise WriteError(f"{self.path} is gone: its folder was moved or deleted during the run, which ends here.")
        row = {"step": step, **{key: _finite(value) for key, value in values.items() if key != "step"}}
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with writing_to(self.path):
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, "short write")

    def close(self) -> None:
        self._file.close()


class MetricsFile(StepLines):
    """`training_metrics.jsonl`: the step, the time in seconds since 1970, and the metrics of that step."""

    def append(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Record the metrics of one optimizer step. NaN and infinity become null: JSON has no notation for them."""
        self.write(step, {"time": round(time.time(), 3), **metrics})


class MediaFile(StepLines):
    """`validation_media.jsonl`: every preview of the run.

    Attributes:
        paths: of the previews in it.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        super().__init__(path, resume_step)
        self.paths = {record.path for record in read_media(path)}

    def append(self, record: MediaRecord) -> None:
        """Record one rendered preview, in place of an earlier one in the same file."""
        if record.path in self.paths:
            self.drop(lambda row: row.get("path") == record.path)
        self.paths.add(record.path)
        self.write(record.step, asdict(record))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, oldest first; none if there is no file. A torn last line is left out."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    rows = (parse_row(line) for line in content.splitlines(keepends=True))
    return [row for row in rows if row is not None]


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The metrics of each step, oldest first. Rows of one step (losses, then an evaluation) are merged."""
    steps: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        steps.setdefault(row["step"], {}).update(row)
    return list(steps.values())


def read_media(path: Path) -> list[MediaRecord]:
    """The previews of a media file. If a file was rendered twice, only the last record counts."""
    names = {field.name for field in fields(MediaRecord)}
    records = (MediaRecord(**{name: row[name] for name in names & row.keys()}) for row in read_rows(path))
    return list({record.path: record for record in records}.values())


def parse_row(line: bytes, number: str = "step") -> dict[str, Any] | None:
    """The row in a complete line, if it has that whole number, or None. A line without newline was torn by a kill."""
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get(number), int) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
