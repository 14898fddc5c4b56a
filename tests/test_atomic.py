"""Files and folders appear whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from simpletuner.atomic import (
    build_folder,
    open_atomically,
    sweep_files,
    sweep_folders,
    write_atomically,
    write_json,
    writing_to,
)
from simpletuner.errors import DiskFullError, WriteError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("durable", [True, False])
def test_text_bytes_and_json_are_written_into_new_folders(tmp_path: Path, durable: bool) -> None:
    write_atomically(tmp_path / "a" / "text", "रंग\n", durable=durable)
    write_atomically(tmp_path / "a" / "bytes", b"\x00\xff", durable=durable)

    write_json(tmp_path / "a" / "json", {"लाल": [1, None]}, durable=durable)

    assert (tmp_path / "a" / "text").read_bytes() == "रंग\n".encode()
    assert (tmp_path / "a" / "bytes").read_bytes() == b"\x00\xff"
    assert json.loads((tmp_path / "a" / "json").read_text("utf-8")) == {"लाल": [1, None]}
    assert names(tmp_path / "a") == ["bytes", "json", "text"]


def test_an_exception_keeps_the_old_file_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail() -> None:
        with open_atomically(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_path_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(DiskFullError, match=str(path)) as caught:
        write_atomically(path, "new")
    assert caught.value.exit_code == 2
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EROFS])
def test_a_failing_disk_names_the_path_and_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(
        WriteError, match=re.escape(f"{path}: cannot be written ({os.strerror(code)})")
    ):
        write_atomically(path, "new")
    assert path.read_text() == "old"

    # As torch.save fails, closing an archive that it could not write.
    error_on_closing = RuntimeError("unexpected pos 704 vs 598")
    error_on_closing.__context__ = OSError(code, os.strerror(code))
    with pytest.raises(WriteError), writing_to(path):
        raise error_on_closing
    with pytest.raises(OSError, match="source"), writing_to(path):
        raise OSError(code, os.strerror(code), "/elsewhere/source")


def test_a_suppressed_cause_is_ignored(tmp_path: Path) -> None:
    error = ValueError("another")
    error.__context__ = OSError(errno.EIO, "of a file that was read")
    error.__suppress_context__ = True  # as with `from None`

    with pytest.raises(ValueError, match="another"), writing_to(tmp_path / "file"):
        raise error


def test_a_full_disk_is_recognised_in_the_words_of_native_writers(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError), writing_to(tmp_path):
        raise RuntimeError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        )

    # As torch.save fails, closing an archive that it could not write.
    error_on_closing = RuntimeError("unexpected pos 704 vs 598")
    error_on_closing.__context__ = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(DiskFullError), writing_to(tmp_path):
        raise error_on_closing
    with pytest.raises(PermissionError), writing_to(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_folder_takes_its_name_when_complete_and_replaces_an_old_one(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-10"
    for content in ("first", "second"):
        with build_folder(final) as folder:
            assert folder.name == "checkpoint-10-tmp"
            assert not list(folder.iterdir())
            (folder / "inner").mkdir()
            (folder / "inner" / "weights").write_text(content)
            if content == "second":
                assert (final / "inner" / "weights").read_text() == "first"
        assert (final / "inner" / "weights").read_text() == content
        assert names(tmp_path) == ["checkpoint-10"]


def test_a_failed_folder_is_removed_and_the_old_one_stays(tmp_path: Path) -> None:
    final = tmp_path / "checkpoint-10"
    with build_folder(final) as folder:
        (folder / "weights").write_text("first")

    def fail() -> None:
        with build_folder(final) as folder:
            (folder / "weights").write_text("second")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFullError, match="checkpoint-10"):
        fail()
    assert (final / "weights").read_text() == "first"
    assert names(tmp_path) == ["checkpoint-10"]


def test_a_folder_build_starts_empty_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-10-tmp").mkdir()
    (tmp_path / "checkpoint-10-tmp" / "stale").write_text("half")

    with build_folder(tmp_path / "checkpoint-10") as folder:
        (folder / "weights").write_text("whole")

    assert names(tmp_path / "checkpoint-10") == ["weights"]


WRITER = """
import sys
from pathlib import Path
from simpletuner.atomic import write_atomically
path = Path(sys.argv[1])
for n in range(10**9):
    write_atomically(path, bytes([n % 256]) * 300_000, durable=False)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_kill_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for delay in (0.01, 0.017, 0.031):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
        while not path.exists():
            assert process.poll() is None
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        content = path.read_bytes()
        assert len(content) == 300_000
        assert len(set(content)) == 1
        path.unlink()


@pytest.mark.parametrize("refused", ["folder", "folder/below"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_read_only_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, refused: str
) -> None:
    final = tmp_path / "folder" / "below" / "a.json"

    def refuse(path: Path, *arguments: object, **more: object) -> None:
        raise OSError(code, os.strerror(code), str(tmp_path / refused))

    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(WriteError, match=f"^{final}: cannot be written "):
        write_atomically(final, b"x")


def test_an_unreadable_source_is_not_a_write_error(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), writing_to(tmp_path / "a.json"):
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/picture.png")


def test_sweeping_removes_only_our_unfinished_files(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    ours = [folder / ".entry.zst.0123456789ab.tmp" for folder in (tmp_path, below)]
    theirs = [tmp_path / ".notes.tmp", tmp_path / "entry.0123456789ab.tmp", tmp_path / "entry.zst"]
    for path in (*ours, *theirs):
        path.touch()

    sweep_files(tmp_path)
    assert [path.exists() for path in ours] == [False, True]

    sweep_files(tmp_path, deep=True, older_than=60)
    assert ours[1].exists(), "another process may be writing it"

    sweep_files(tmp_path, deep=True)
    assert not ours[1].exists()
    assert all(path.exists() for path in theirs)


def test_sweeping_ignores_a_file_renamed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = tmp_path / ".left.0123456789ab.tmp"
    stray.touch()
    monkeypatch.setattr(
        os, "walk", lambda folder: [(str(folder), [], [".gone.0123456789ab.tmp", stray.name])]
    )

    sweep_files(tmp_path)

    assert not stray.exists()


def test_a_folder_between_two_renames_is_restored(tmp_path: Path) -> None:
    for name in (
        "pipeline-old-tmp",
        "checkpoint-4-tmp",
        "checkpoint-6",
        "checkpoint-6-old-tmp",
        "mine-tmp",
    ):
        (tmp_path / name).mkdir()
    sweep_folders(tmp_path, re.compile(r"checkpoint-\d+|pipeline"))

    assert {path.name for path in tmp_path.iterdir()} == {"pipeline", "checkpoint-6", "mine-tmp"}


def test_a_file_keeps_its_permissions_when_it_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch(0o600)

    write_json(path, {"webhook_config": []})

    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
@pytest.mark.parametrize("private", [True, False])
def test_files_are_written_to_disks_without_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, private: bool
) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise OSError(code, os.strerror(code), str(path))

    path = tmp_path / "queue.json"
    path.write_text("old")
    monkeypatch.setattr(Path, "chmod", refuse)

    write_atomically(path, "new", private=private)

    assert path.read_text() == "new"
