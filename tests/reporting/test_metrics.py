"""The record of a run survives kills and resumes without doubles."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from simpletuner.errors import DiskFullError, WriteError
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    METRICS_FILE,
    MediaFile,
    MediaRecord,
    MetricsFile,
    StepLines,
    describe_damage,
    read_media,
    read_rows,
)


def steps_in(path: Path) -> list[int]:
    return [row["step"] for row in read_rows(path)]


def record(path: Path, steps: range, resume_step: int = 0) -> None:
    metrics = MetricsFile(path, resume_step)
    for step in steps:
        metrics.append(step, {"train_loss": 1 / step, "learning_rate": 1e-4})
    metrics.close()


def test_rows_have_step_time_and_metrics(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "training_metrics.jsonl"
    record(path, range(1, 4))

    rows = list(read_rows(path))

    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[1]["train_loss"] == 0.5
    assert rows[0]["time"] > 1.7e9


def test_each_line_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = MetricsFile(path)
    metrics.append(1, {"train_loss": 1.0})
    assert steps_in(path) == [1]
    metrics.close()


def test_resume_drops_rows_of_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    record(path, range(1, 11))

    record(path, range(7, 13), resume_step=6)

    assert steps_in(path) == list(range(1, 13))


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    record(path, range(1, 6))

    path.write_bytes(path.read_bytes() + b'{"step": 6, "train_lo')
    assert steps_in(path) == [1, 2, 3, 4, 5]

    record(path, range(6, 8), resume_step=6)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6, 7]


def test_a_line_torn_exactly_before_its_newline_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    record(path, range(1, 4))
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))

    record(path, range(3, 5), resume_step=3)

    assert steps_in(path) == [1, 2, 3, 4]


def test_a_fresh_run_starts_an_empty_record(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    record(path, range(1, 6))

    record(path, range(1, 3))

    assert steps_in(path) == [1, 2]


def test_nothing_is_rewritten_when_nothing_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    record(path, range(1, 6))
    before = path.stat()

    MetricsFile(path, resume_step=5).close()

    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert list(read_rows(tmp_path / "absent.jsonl")) == []


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    metrics = MetricsFile(path)
    metrics.append(1, {"train_loss": float("nan"), "grad_absmax": float("inf")})

    metrics.close()

    assert json.loads(path.read_text())["train_loss"] is None
    assert next(read_rows(path))["grad_absmax"] is None


def test_a_failed_replacement_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    record(path, range(1, 6))
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(DiskFullError, match="no space left"):
        StepLines(path, resume_step=2)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_user_error(tmp_path: Path) -> None:
    lines = StepLines(tmp_path / "m.jsonl")
    lines.close()
    with Path("/dev/full").open("ab", buffering=0) as full:
        lines._file = full
        with pytest.raises(DiskFullError):
            lines.write(1, {})


def test_the_last_record_of_a_preview_counts(tmp_path: Path) -> None:
    path = tmp_path / "validation_media.jsonl"
    first = MediaRecord(
        0, "glimmer", "ein Schimmer <b>", "validation_images/step_0_glimmer_0_96x96.png", 96, 96, 7
    )
    later = MediaRecord(
        50, "glimmer", "ein Schimmer <b>", "validation_images/step_50.png", 96, 64, 7, ema=True
    )
    media = MediaFile(path)
    for item in (first, first, later):
        media.append(item)

    media.close()
    assert read_media(path) == [first, later]

    MediaFile(path, resume_step=49).close()
    assert read_media(path) == [first]


def test_a_folder_that_is_deleted_ends_the_record(tmp_path: Path) -> None:
    lines = StepLines(tmp_path / "output" / "m.jsonl")
    lines.write(1, {"loss": 0.5})
    shutil.rmtree(tmp_path / "output")

    with pytest.raises(WriteError, match=r"m\.jsonl is gone: its folder was moved or deleted"):
        lines.write(2, {"loss": 0.25})


@pytest.mark.parametrize("name", [METRICS_FILE, MEDIA_FILE])
@pytest.mark.parametrize(
    ("lines", "damage"),
    [
        ([], ""),
        (["noise"], "line 2 is damaged and skipped"),
        (["[]", '{"step": -1}', ""], "3 lines (the first is 2) are damaged and skipped"),
    ],
)
def test_damaged_lines_are_named(tmp_path: Path, name: str, lines: list[str], damage: str) -> None:
    preview = {
        "step": 1,
        "short_name": "a",
        "prompt": "a",
        "path": "a.png",
        "width": 8,
        "height": 8,
    }
    path = tmp_path / name
    path.write_text("".join(f"{line}\n" for line in [json.dumps(preview), *lines]) + '{"step": 2')

    message = describe_damage(path)

    assert bool(message) == bool(lines)
    assert message.startswith(f"{name}: {damage}" if damage else "")


def test_rows_without_preview_damage_only_the_media_file(tmp_path: Path) -> None:
    for name in (METRICS_FILE, MEDIA_FILE):
        (tmp_path / name).write_text('{"step": 1, "path": 3}\n')

    assert describe_damage(tmp_path / METRICS_FILE) == ""
    assert describe_damage(tmp_path / MEDIA_FILE).startswith(f"{MEDIA_FILE}: line 1 is damaged")
