"""The record of a run: `training_metrics.jsonl` and `validation_media.jsonl`, a JSON object a line.

Both are appended and flushed line by line, so that a killed run loses at most the line being
written. A run that resumes at step S first drops the rows after S, because it will record those
steps again.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import write_atomically, write_fully, writing_to
from simpletuner.errors import WriteError

METRICS_FILE = "training_metrics.jsonl"
MEDIA_FILE = "validation_media.jsonl"
REPORT_FILE = "training_report.html"
MIME = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
VIDEO_MIME = {".mp4": "video/mp4", ".webm": "video/webm"}

EVALUATED = "loss/val/"  # name prefix of evaluation losses
TIMESTEPS = "timesteps"  # the only list in a row
TAIL = 1 << 16  # bytes at the end of a file, more than a row has
COMPUTE = "compute"
WEIGHTS = "weights"
DATA = "data"

Value = float | int | bool | str | list[float] | None


@dataclass(frozen=True)
class MediaRecord:
    """One rendered preview.

    Attributes:
        step: optimizer step of the preview; 0 is the untrained model.
        short_name: short name of the prompt (`unconditional`, a nickname of the library,
            `validation`).
        prompt: full text of the prompt.
        path: path of the file, relative to output_dir, with forward slashes.
        width, height: actual size in pixels.
        seed: seed of the initial noise.
        ema: rendered with the moving average.
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

    @property
    def row(self) -> tuple[str, int, int, int]:
        """Row of a grid: the same for all steps, and for plain and averaged weights."""
        return self.short_name, self.index, self.width, self.height

    def file_stem(self, clip_frames: int | None = None) -> str:
        """The file name of a preview without its suffix: `step_20_star_0_768x512_ema`."""
        dimensions = file_dimensions(self.width, self.height, clip_frames)
        stem = f"step_{self.step}_{self.short_name}_{self.index}_{dimensions}"
        return f"{stem}_ema" if self.ema else stem

    def benchmark_stem(self, clip_frames: int | None = None) -> str:
        """The file name of a preview of the untrained model, without its suffix.

        `star_768x512` and `star_768x512_1` for pictures, `star_768x512@61_0` for clips.
        """
        stem = f"{self.short_name}_{file_dimensions(self.width, self.height, clip_frames)}"
        # Names of the first picture have no index, those of clips always have one.
        return f"{stem}_{self.index}" if self.index or clip_frames is not None else stem


def file_dimensions(width: int, height: int, clip_frames: int | None = None) -> str:
    """A size in file names: `768x512`, or `768x512@61` with the number of frames of a clip."""
    size = f"{width}x{height}"
    return size if clip_frames is None else f"{size}@{clip_frames}"


MEDIA = TypeAdapter(MediaRecord)


class StepLines:
    """A file of JSON lines with a `step` each, open for appending.

    Args:
        path: created if missing.
        resume_step: first drops lines of later steps and a torn last line; 0, for a new run, drops
            all lines.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        self.path = Path(path)
        with writing_to(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        is_new_run = resume_step == 0
        self.drop(lambda row: is_new_run or row["step"] > resume_step)

    def drop(self, unwanted: Callable[[dict[str, Any]], bool]) -> None:
        """Remove the rows for which `unwanted` is true, and torn lines."""
        before = self.path.read_bytes()
        kept = []
        for line in before.splitlines(keepends=True):
            row = parse_row(line)
            if row is not None and not unwanted(row):
                kept.append(line)
        after = b"".join(kept)
        if after != before:
            self._file.close()
            # Replaced, not truncated, so that a kill keeps the old record. The old handle would
            # write to a deleted file.
            write_atomically(self.path, after)
            self._file = self.path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line, unbuffered: once this returns, the line survives a kill of the process.

        Raises:
            DiskFullError: no space left; the next start drops the torn line.
            WriteError: the file has been deleted.
        """
        if not self.path.exists():  # writing to the open file would silently lose every line
            raise WriteError(
                f"{self.path} is gone: its folder was moved or deleted during the run, which "
                "ends here."
            )
        row: dict[str, Any] = {"step": step}
        for key, value in values.items():
            if key != "step":
                row[key] = _finite(value)
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        with writing_to(self.path):
            write_fully(self._file, line)

    def close(self) -> None:
        self._file.close()


class MetricsFile(StepLines):
    """`training_metrics.jsonl`: the metrics of every step, and its time in seconds since 1970."""

    def append(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Record the metrics of a step; NaN and infinity, which JSON lacks, become null."""
        self.write(step, {"time": round(time.time(), 3), **metrics})


class MediaFile(StepLines):
    """`validation_media.jsonl`: every preview of the run.

    Attributes:
        paths: paths of the recorded previews.
    """

    def __init__(self, path: Path, resume_step: int = 0) -> None:
        super().__init__(path, resume_step)
        self.paths = {record.path for record in read_media(path)}

    def append(self, record: MediaRecord) -> None:
        """Record one preview, replacing an earlier record with the same path."""
        if record.path in self.paths:
            self.drop(lambda row: row.get("path") == record.path)
        self.paths.add(record.path)
        self.write(record.step, asdict(record))


def shares(
    seconds: float, data_seconds: float, weights_seconds: float | None = None
) -> dict[str, float]:
    """Shares of time spent computing and waiting; they add up to 1.

    Args:
        seconds: duration of one or more steps, including waits.
        weights_seconds: None if no weights are streamed, which omits their share.
    """
    if seconds <= 0:
        return {}
    waits = {} if weights_seconds is None else {WEIGHTS: weights_seconds}
    waits[DATA] = data_seconds
    # Waits are measured separately and may be slightly longer than the step.
    parts = {name: min(1.0, wait / seconds) for name, wait in waits.items()}
    return {COMPUTE: max(0.0, 1.0 - sum(parts.values())), **parts}


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The valid rows of a file of JSON lines, oldest first; none if the file is missing."""
    if not Path(path).is_file():
        return
    with Path(path).open("rb") as file:
        for line in file:
            row = parse_row(line)
            if row is not None:
                yield row


def last_recorded_step(path: Path) -> int:
    """The step of the last row in a metrics file; 0 without one. Reads the end of the file only."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        lines = file.read().splitlines(keepends=True)
    for line in reversed(lines):
        row = parse_row(line)
        if row is not None:
            return int(row["step"])
    return 0


def read_media(path: Path) -> list[MediaRecord]:
    """The previews of a media file. If a path occurs twice, the last record counts."""
    records = {}
    for row in read_rows(path):
        record = _preview_in(row)
        if record is not None:
            records[record.path] = record
    return list(records.values())


def _preview_in(row: Mapping[str, Any]) -> MediaRecord | None:
    try:
        return MEDIA.validate_python(row)
    except ValidationError:
        return None


def describe_damage(path: Path) -> str:
    """A message about the lines of a record that readers skip; empty if there are none.

    A torn last line is not damage: it was being written when the run was killed.
    """
    if not path.is_file():
        return ""
    numbers: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n") and not _is_valid(line, is_preview=path.name == MEDIA_FILE):
                numbers.append(number)
    if not numbers:
        return ""
    if len(numbers) == 1:
        lines = f"line {numbers[0]:,} is"
    else:
        lines = f"{len(numbers):,} lines (the first is {numbers[0]:,}) are"
    return f"{path.name}: {lines} damaged and skipped; the other lines are used."


def _is_valid(line: bytes, *, is_preview: bool) -> bool:
    row = parse_row(line)
    if row is None:
        return False
    return not is_preview or _preview_in(row) is not None


def parse_row(line: bytes, number: str = "step") -> dict[str, Any] | None:
    """The object in a line of JSON; None if the line is damaged.

    Args:
        number: the key that must hold a count, such as the step.
    """
    if not line.endswith(b"\n"):  # torn by a kill
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    count = row.get(number)
    # Columns store steps in 64 bits. Not isinstance, since True is an int too.
    return row if type(count) is int and 0 <= count < 2**63 else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
