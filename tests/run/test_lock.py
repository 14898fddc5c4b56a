"""One run at a time in an output folder, whatever became of the one before."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import BinaryIO

import pytest

from simpletuner.errors import UserError
from simpletuner.run import lock
from simpletuner.run.lock import LOCK_FILE, Owner, create, create_in_place, hold, lock_output, take_over, this_process
from tests.processes import PATIENCE
from tests.workspace import Workspace

HOLD = """
import sys
from pathlib import Path
from simpletuner.errors import UserError
from simpletuner.run.lock import lock_output
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
    """Starts a process that takes a folder's lock at the first line it reads and releases it at the second."""
    started: list[Holder] = []

    def start(folder: Path) -> Holder:
        command = [sys.executable, "-c", HOLD, str(folder), "--auth_token=open-sesame"]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1))
        assert hear(started[-1]) == "ready\n"
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.communicate()


def tell(process: Holder) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")


def hear(process: Holder) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def write_lock(folder: Path, owner: Owner) -> None:
    (folder / LOCK_FILE).write_text(json.dumps(asdict(owner)))


def test_a_second_run_is_refused_before_it_writes(
    tmp_path: Path, t2i_checkpoint: Path, holder: Callable[[Path], Holder], capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.create(tmp_path, t2i_checkpoint)
    output = workspace.path("output")
    output.mkdir()
    first = holder(output)
    tell(first)
    assert hear(first) == "held\n"
    assert "open-sesame" not in (output / LOCK_FILE).read_text(), "everybody may read it"
    assert workspace.train() == 2
    message = capsys.readouterr().err
    assert f"output is in use by process {first.pid} on {this_process().host} (`-c {output}`" in message
    assert re.search(r"`, started [\d.:]+( s)? ago\)", message)
    assert [path.name for path in output.iterdir()] == [LOCK_FILE]
    assert workspace.train("--dry-run") == 0, "who only reads takes no lock"
    tell(first)
    first.wait(PATIENCE)
    assert list(output.iterdir()) == []


def test_the_lock_of_a_killed_run_is_taken_over(
    tmp_path: Path, holder: Callable[[Path], Holder], caplog: pytest.LogCaptureFixture
) -> None:
    first = holder(tmp_path)
    tell(first)
    assert hear(first) == "held\n"
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has collected it
    with caplog.at_level("INFO"), lock_output(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == this_process().pid
    assert f"process {first.pid} on" in caplog.text
    assert not (tmp_path / LOCK_FILE).exists()


def test_of_several_that_find_a_dead_owner_one_gets_the_lock(tmp_path: Path, holder: Callable[[Path], Holder]) -> None:
    write_lock(tmp_path, replace(this_process(), started="0"))
    several = [holder(tmp_path) for _ in range(4)]
    for each in several:
        tell(each)
    heard = [hear(each) for each in several]
    assert heard.count("held\n") == 1
    winner = several[heard.index("held\n")]
    assert sum(f"process {winner.pid} on" in line for line in heard) == 3


def test_whoever_takes_over_waits_for_another_that_is_at_it(tmp_path: Path, holder: Callable[[Path], Holder]) -> None:
    write_lock(tmp_path, replace(this_process(), started="0"))
    with (tmp_path / LOCK_FILE).open("rb") as file:
        hold(file)
        second = holder(tmp_path)
        tell(second)
        assert second.stdout is not None
        assert select.select([second.stdout], [], [], 0.5)[0] == []
        write_lock(tmp_path, this_process())
    assert f"in use by process {this_process().pid} on" in hear(second)


def test_a_lock_goes_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), lock_output(tmp_path):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"boot": "an earlier one"}, {"started": "1"}, {"pid": 2**30, "started": ""}])
def test_an_owner_of_another_time_is_gone(tmp_path: Path, change: dict[str, object]) -> None:
    write_lock(tmp_path, replace(this_process(), **change))
    with lock_output(tmp_path):
        pass


def test_another_host_is_said_and_not_judged(tmp_path: Path) -> None:
    write_lock(tmp_path, replace(this_process(), pid=2**30, host="elsewhere"))
    with pytest.raises(UserError, match=rf"on elsewhere .* delete .*{LOCK_FILE}"), lock_output(tmp_path):
        pass
    assert (tmp_path / LOCK_FILE).exists()


def test_a_lock_of_another_host_is_taken_over_once_it_has_not_changed_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "ABANDONED_SECONDS", 0.2)
    write_lock(tmp_path, replace(this_process(), host="elsewhere", since=9e12, beat=f"{3:08}"))  # a clock ahead
    with caplog.at_level("INFO"), lock_output(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == this_process().host
    assert "on elsewhere" in caplog.text
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_lock_in_which_its_owner_counts_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, holder: Callable[[Path], Holder]
) -> None:
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 0.05)
    with lock_output(tmp_path):
        first = counted(tmp_path)
        assert counted(tmp_path, after=first) > first, "the owner counts"
        monkeypatch.setattr(lock.socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(UserError, match="is in use by process"), lock_output(tmp_path):
            pass
        monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def counted(folder: Path, after: str = f"{0:08}") -> str:
    """The count in a lock once it has passed another one."""
    while (beat := json.loads((folder / LOCK_FILE).read_text())["beat"]) <= after:
        time.sleep(0.01)
    return str(beat)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_has_lost_its_lock_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "REFRESH_SECONDS", 0.05)
    ended = threading.Event()

    def end(code: int) -> None:
        ended.set()
        raise SystemExit(code)  # of the thread

    monkeypatch.setattr(lock.os, "_exit", end)
    other = replace(this_process(), host="elsewhere")
    with lock_output(tmp_path):
        counted(tmp_path)
        write_lock(tmp_path, other)
        assert ended.wait(60)
    assert json.loads((tmp_path / LOCK_FILE).read_text())["host"] == "elsewhere", "it is not removed either"


@pytest.mark.parametrize("successor", [None, "elsewhere"])
def test_a_lock_that_was_replaced_meanwhile_is_not_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, successor: str | None
) -> None:
    """Another process took it over, and ended; perhaps a third one holds the folder now."""
    path = tmp_path / LOCK_FILE
    write_lock(tmp_path, replace(this_process(), started="0"))

    def hold_too_late(file: BinaryIO) -> None:
        path.unlink()
        if successor:
            write_lock(tmp_path, replace(this_process(), host=successor))

    monkeypatch.setattr(lock, "hold", hold_too_late)
    assert not take_over(path, this_process().content)
    assert path.exists() == (successor is not None)
    assert successor is None or successor in path.read_text()


def test_a_run_that_ends_leaves_the_lock_of_another(tmp_path: Path) -> None:
    with lock_output(tmp_path):
        counted(tmp_path)
        write_lock(tmp_path, replace(this_process(), host="elsewhere"))
    assert "elsewhere" in (tmp_path / LOCK_FILE).read_text()


def test_a_lock_without_content_is_said_and_not_judged(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).touch()
    with pytest.raises(UserError, match=rf"{LOCK_FILE} does not say which run"), lock_output(tmp_path):
        pass


@pytest.mark.parametrize("make", [create, create_in_place])
def test_a_lock_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, make: Callable[[Path, bytes], bool]
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as on a full disk, a file can be made but not filled
    try:
        with pytest.raises(OSError, match="File too large"):
            make(tmp_path / LOCK_FILE, b"content")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_without_links_there_is_one_lock_too(tmp_path: Path) -> None:
    assert create_in_place(tmp_path / LOCK_FILE, b"first")
    assert not create_in_place(tmp_path / LOCK_FILE, b"second")
    assert (tmp_path / LOCK_FILE).read_bytes() == b"first"
