"""One run at a time in an output folder, whatever became of the one before."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from simpletuner.errors import UserError
from simpletuner.planning import lock
from simpletuner.planning.lock import (
    LOCK_FILE,
    Owner,
    is_at,
    lock_output,
    take,
    take_lock,
    this_process,
)
from tests.tools.processes import PATIENCE
from tests.tools.workspace import Workspace

HOLD = """
import sys
from pathlib import Path
from simpletuner.errors import UserError
from simpletuner.planning.lock import lock_output
print("ready", flush=True)
sys.stdin.readline()
try:
    with lock_output(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.readline()
except UserError as error:
    print(error, flush=True)
"""
Holder = subprocess.Popen[str]


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[Path], Holder]]:
    """Starts a process that locks a folder after a line of input and releases it after the next."""
    started: list[Holder] = []

    def start(folder: Path) -> Holder:
        command = [sys.executable, "-c", HOLD, str(folder), "--auth_token=open-sesame"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        started.append(process)
        assert read_line(process) == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def write_line(process: Holder) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def read_line(process: Holder) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def write_lock(folder: Path, owner: Owner) -> None:
    (folder / LOCK_FILE).write_text(json.dumps(asdict(owner)))


def test_second_run_is_refused_before_it_writes(
    tmp_path: Path,
    t2i_checkpoint: Path,
    holder: Callable[[Path], Holder],
    capsys: pytest.CaptureFixture[str],
) -> None:
    workspace = Workspace.create(tmp_path, t2i_checkpoint)
    output = workspace.path("output")
    output.mkdir()
    first = holder(output)
    write_line(first)
    assert read_line(first) == "held\n"
    assert "open-sesame" not in (output / LOCK_FILE).read_text(), "everybody may read it"

    assert workspace.train() == 2

    message = capsys.readouterr().err
    owner = f"process {first.pid} on {this_process().host}"
    assert f"output is in use by {owner} (`-c {output}`" in message
    assert re.search(r"`, started [\d.:]+( s)? ago\)", message)
    assert [path.name for path in output.iterdir()] == [LOCK_FILE]
    assert workspace.train("--dry-run") == 0, "a plan takes no lock"

    write_line(first)
    first.wait(PATIENCE)

    assert list(output.iterdir()) == []


def test_lock_of_a_killed_run_is_taken_over(
    tmp_path: Path, holder: Callable[[Path], Holder]
) -> None:
    first = holder(tmp_path)
    write_line(first)
    assert read_line(first) == "held\n"
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # until it is a zombie
    assert (tmp_path / LOCK_FILE).exists()

    with lock_output(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == this_process().pid
    assert not (tmp_path / LOCK_FILE).exists()


def test_one_of_several_processes_gets_the_lock_of_a_dead_owner(
    tmp_path: Path, holder: Callable[[Path], Holder]
) -> None:
    write_lock(tmp_path, replace(this_process(), started="0"))
    processes = [holder(tmp_path) for _ in range(4)]

    for process in processes:
        write_line(process)

    lines = [read_line(process) for process in processes]
    assert lines.count("held\n") == 1
    assert sum("is in use by" in line for line in lines) == 3


def test_lock_is_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_output(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "an earlier one"},
        {"started": "1"},
        {"pid": 2**30, "started": ""},
        {"host": "elsewhere"},
    ],
)
def test_owner_from_another_boot_or_host_is_not_alive_here(change: dict[str, Any]) -> None:
    assert this_process().lives_here
    assert not replace(this_process(), **change).lives_here


@pytest.mark.parametrize("content", [b"", b"[1]"])
def test_damaged_lock_that_no_process_holds_is_ignored(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_FILE).write_bytes(content)
    with lock_output(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == this_process().pid


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "in use by a process that has just"), (b"[1]", "does not say which")],
)
def test_held_lock_without_an_owner_is_in_use(tmp_path: Path, content: bytes, words: str) -> None:
    with (tmp_path / LOCK_FILE).open("wb") as file:
        file.write(content)
        file.flush()
        take_lock(file)
        with pytest.raises(UserError, match=words), lock_output(tmp_path):
            pass


def test_lock_of_another_host_is_taken_over_once_it_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "ABANDONED_SECONDS", 0.2)
    write_lock(tmp_path, replace(this_process(), host="elsewhere", since=9e12))  # a clock ahead
    with caplog.at_level("INFO"), lock_output(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == this_process().host

    assert "on elsewhere" in caplog.text
    assert not (tmp_path / LOCK_FILE).exists()


def test_lock_refreshed_by_another_host_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that keeps the locks of machines apart."""
    owner = replace(this_process(), host="elsewhere")
    path = tmp_path / LOCK_FILE
    write_lock(tmp_path, owner)
    monkeypatch.setattr(lock.time, "sleep", lambda seconds: os.utime(path, (1, 1)))
    with (
        pytest.raises(UserError, match=r"is in use by process .* on elsewhere"),
        lock_output(tmp_path),
    ):
        pass

    assert json.loads(path.read_text()) == asdict(owner)


def test_owner_refreshes_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 0.05)
    with lock_output(tmp_path):
        os.utime(tmp_path / LOCK_FILE, (1, 1))
        while (tmp_path / LOCK_FILE).stat().st_mtime == 1:
            time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []


def test_process_that_has_lost_its_lock_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 0.05)
    ended = threading.Event()

    def end(code: int) -> None:
        ended.set()
        raise SystemExit(code)  # of the thread

    monkeypatch.setattr(lock.os, "_exit", end)
    with lock_output(tmp_path):
        write_lock(tmp_path, replace(this_process(), host="elsewhere"))
        assert ended.wait(60)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == "elsewhere", (
        "it is not removed either"
    )


def test_lock_removed_while_it_is_opened_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner ended between the opening of the file and its locking."""
    path = tmp_path / LOCK_FILE
    held: list[BinaryIO] = []

    def hold_too_late(file: BinaryIO, *, wait: bool) -> bool:
        if not held:
            path.unlink()
        held.append(file)
        return take_lock(file, wait=wait)

    monkeypatch.setattr(lock, "take_lock", hold_too_late)
    file = take(path)
    assert file is held[1]
    with file:
        assert is_at(path, file)
    assert held[0].closed


def test_run_that_ends_keeps_the_lock_of_another_run(tmp_path: Path) -> None:
    with lock_output(tmp_path):
        (tmp_path / LOCK_FILE).unlink()
        write_lock(tmp_path, replace(this_process(), host="elsewhere"))
    assert "elsewhere" in (tmp_path / LOCK_FILE).read_text()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP])
def test_disk_without_locks_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """A second run is still refused while the process in the lock file lives or refreshes it."""

    def refuse(file: BinaryIO, how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lock, "ABANDONED_SECONDS", 0.2)
    with lock_output(tmp_path):
        assert "is on a disk without locks. Start one run at a time" in caplog.text
        with (
            pytest.raises(UserError, match=rf"in use by process {os.getpid()} on"),
            lock_output(tmp_path),
        ):
            pass
    assert list(tmp_path.iterdir()) == []
    write_lock(tmp_path, replace(this_process(), host="elsewhere"))
    with lock_output(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
