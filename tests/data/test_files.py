"""Reading files: what is not a regular file, and devices that fail."""

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


def fail_times(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises EIO so many times, and then calls another."""
    failures_left = count

    def attempt(*arguments: Any) -> Any:
        nonlocal failures_left
        if failures_left > 0:
            failures_left -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*arguments)

    return attempt


def make_irregular_files(folder: Path) -> list[Path]:
    """A pipe, a link to a device, a folder and a sparse giant; opening the first would block."""
    pipe = folder / "pipe.png"
    os.mkfifo(pipe)
    device = folder / "device.png"
    device.symlink_to("/dev/zero")
    directory = folder / "folder.png"
    directory.mkdir()
    giant = folder / "giant.png"
    with giant.open("wb") as file:
        file.truncate(LARGEST_PICTURE + 1)
    return [pipe, device, directory, giant]


def test_settings_are_read_from_regular_files_of_a_plausible_size_alone(tmp_path: Path) -> None:
    problems = Problems()
    paths = make_irregular_files(tmp_path)

    contents = [read_json(path, problems) for path in paths]

    assert contents == [None] * 4
    for problem in problems[:3]:
        assert "is not a regular file but a folder, a pipe" in problem.message
    assert problems[3].message == "has 1,073,741,825 bytes; the limit is 268,435,456."


def test_irregular_files_are_reported_without_opening_them(tmp_path: Path) -> None:
    paths = make_irregular_files(tmp_path)

    facts = inspect_files(tmp_path, [path.name for path in paths], {})

    problems = {name: fact.problem or "" for name, fact in facts.items()}
    for path in paths[:3]:
        assert "not a regular file" in problems[path.name]
    assert "bytes" in problems["giant.png"]
    assert not any(fact.content for fact in facts.values())


def test_captions_are_read_from_regular_files_alone(tmp_path: Path) -> None:
    for path in make_irregular_files(tmp_path):
        with pytest.raises(LeftOutError):
            read_caption_file(path)


def test_captions_have_a_limit_of_size(tmp_path: Path) -> None:
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(LARGEST_CAPTION + 1)

    with pytest.raises(LeftOutError, match="bytes"):
        read_caption_file(tmp_path / "a.txt")


def test_captions_in_utf16_need_a_byte_order_mark(tmp_path: Path) -> None:
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
    message = r"a\.png: Input/output error.*no file is marked as damaged"

    with pytest.raises(DeviceError, match=message):
        inspect_files(tmp_path, ["a.png"], {})


def test_exhausted_resources_are_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures.photograph(tmp_path / "a.png", (64, 64))

    def exhausted(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_bytes", exhausted)
    with pytest.raises(OSError, match="Too many open files"):
        read_file(tmp_path / "a.png", LARGEST_PICTURE)


def test_every_flipped_bit_that_shows_in_a_png_is_detected(tmp_path: Path) -> None:
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
