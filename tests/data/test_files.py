"""Reading files: what is no file, and devices that fail."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.json_reader import read_json
from simpletuner.data import files
from simpletuner.data.captions import read_caption_file
from simpletuner.data.file_index import inspect_files
from simpletuner.data.files import (
    LARGEST_CAPTION,
    LARGEST_PICTURE,
    DeviceError,
    LeftOutError,
    read_file,
)
from simpletuner.data.pictures import MediaError, decode, probe
from simpletuner.errors import Problems
from tests.tools import pictures


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RETRY_DELAYS", (0.0, 0.0))


def fail_times(count: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Raises EIO so many times, then does what it stands for."""
    left = [count]

    def attempt(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    return attempt


def not_files(folder: Path) -> list[Path]:
    """A pipe, a link to a device, a folder and a sparse giant; opening the first would wait for
    ever.
    """
    pipe, device, directory, giant = (
        folder / f"{name}.png" for name in ("pipe", "device", "folder", "giant")
    )
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    directory.mkdir()
    with giant.open("wb") as file:
        file.truncate(LARGEST_PICTURE + 1)
    return [pipe, device, directory, giant]


def test_settings_are_read_from_regular_files_of_a_plausible_size_alone(tmp_path: Path) -> None:
    problems = Problems()
    paths = not_files(tmp_path)
    assert [read_json(path, problems) for path in paths] == [None] * 4
    assert all(
        "is not a regular file but a folder, a pipe" in problem.message for problem in problems[:3]
    )
    assert problems[3].message == "has 1,073,741,825 bytes; the limit is 268,435,456."


def test_what_is_no_usual_file_is_reported_at_once(tmp_path: Path) -> None:
    paths = not_files(tmp_path)
    facts = inspect_files(tmp_path, [path.name for path in paths], {})
    problems = {name: fact.problem or "" for name, fact in facts.items()}
    assert all("not a regular file" in problems[path.name] for path in paths[:3])
    assert "bytes" in problems["giant.png"]
    assert not any(fact.content for fact in facts.values())
    for path in paths:
        with pytest.raises(LeftOutError):
            read_caption_file(path)


def test_captions_are_bounded_and_text(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(LARGEST_CAPTION + 1)
    with pytest.raises(LeftOutError, match="bytes"):
        read_caption_file(tmp_path / "a.txt")
    (tmp_path / "b.txt").write_bytes("a red square".encode("utf-16-le"))
    with pytest.raises(LeftOutError, match="UTF-16"):
        read_caption_file(tmp_path / "b.txt")


def test_a_passing_error_of_the_device_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures.photograph(tmp_path / "a.png", (64, 64))
    monkeypatch.setattr(Path, "read_bytes", fail_times(2, Path.read_bytes))
    assert inspect_files(tmp_path, ["a.png"], {})["a.png"].problem is None


def test_a_lasting_error_of_the_device_ends_the_run_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures.photograph(tmp_path / "a.png", (64, 64))
    monkeypatch.setattr(Path, "read_bytes", fail_times(99, Path.read_bytes))
    with pytest.raises(
        DeviceError, match=r"a\.png: Input/output error.*no file is marked as damaged"
    ):
        inspect_files(tmp_path, ["a.png"], {})


def test_exhaustion_is_not_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures.photograph(tmp_path / "a.png", (64, 64))

    def exhausted(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", exhausted)
    with pytest.raises(OSError, match="Too many open files"):
        read_file(tmp_path / "a.png", LARGEST_PICTURE)


def test_every_flipped_bit_that_shows_in_a_png_is_found(tmp_path: Path) -> None:
    """Pillow alone lets a quarter of them pass."""
    pictures.photograph(tmp_path / "a.png", (120, 80))
    content = (tmp_path / "a.png").read_bytes()
    numbers = random.Random(0)
    for _ in range(300):
        damaged = bytearray(content)
        damaged[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        with pytest.raises(MediaError):
            probe(bytes(damaged))
        with pytest.raises(MediaError):
            decode(bytes(damaged))
