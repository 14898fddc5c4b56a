"""Limits of the machine are reported without a traceback, and nothing is lost.

Open files, the size of a file, threads; a folder where a file belongs.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from simpletuner.atomic import open_atomically, write_atomically
from simpletuner.caching.entry import entry_path, list_keys
from simpletuner.errors import DiskFullError, WriteError, reached_limit
from tests.tools.workspace import Workspace

Capture = pytest.CaptureFixture[str]
COMMANDS = (
    ["plan"],
    ["train"],
    ["cache", "fill"],
    ["cache", "verify"],
    ["cache", "gc"],
    ["dataset"],
)
SETTINGS = ("max_train_steps=1", "checkpoint_step_interval=1")


def thorough(value: int) -> ParameterSet:
    """A further case of a promise that a quicker case keeps."""
    return pytest.param(value, marks=pytest.mark.thorough)


@contextmanager
def limit(kind: int, soft: int) -> Iterator[None]:
    """A lower limit of this process inside the block."""
    before, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def check_answer(code: int, printed: str, reason: str) -> None:
    """Check that a command succeeded, or printed the reason in one line."""
    assert "Traceback" not in printed
    assert code in (0, 2), printed
    assert code == 0 or reason in printed


@pytest.mark.slow(1)
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
@pytest.mark.parametrize("spare", [1, thorough(2), thorough(3), 5])
def test_the_limit_of_open_files_is_reported(
    workspace: Workspace, capsys: Capture, spare: int
) -> None:
    """Only with commands that were run before, so that no module is left to import."""
    assert workspace.train(*SETTINGS, "output_dir=before") == 0
    for command in COMMANDS:
        capsys.readouterr()
        with limit(resource.RLIMIT_NOFILE, open_files() + spare):
            code = workspace.run(*command, *SETTINGS)
        printed = capsys.readouterr().err
        check_answer(
            code,
            printed,
            "ulimit -n" if "Too many open files" not in printed else "Too many open files",
        )


@pytest.mark.slow(1)
@pytest.mark.parametrize("most", [thorough(100), 10_000, thorough(60_000)])
def test_the_limit_of_file_sizes_is_reported(
    workspace: Workspace, capsys: Capture, most: int
) -> None:
    assert workspace.train(*SETTINGS) == 0
    kept = workspace.path("output/pytorch_lora_weights.safetensors").read_bytes()
    capsys.readouterr()

    with limit(resource.RLIMIT_FSIZE, most):
        code = workspace.train("max_train_steps=2", "checkpoint_step_interval=1")

    printed = capsys.readouterr().err
    check_answer(code, printed, "ulimit -f")
    assert code == 2
    assert workspace.path("output/pytorch_lora_weights.safetensors").read_bytes() == kept
    assert workspace.train("max_train_steps=2", "checkpoint_step_interval=1") == 0


@pytest.mark.slow(1)
@pytest.mark.parametrize("started", [thorough(0), 1, 2, thorough(3)])
def test_the_limit_of_threads_is_reported(
    workspace: Workspace, capsys: Capture, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    start = threading.Thread.start
    counted = []

    def start_few(thread: threading.Thread) -> None:
        counted.append(thread)
        if len(counted) > started:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_few)
        code = workspace.train(*SETTINGS)

    check_answer(code, capsys.readouterr().err, "no more threads can be started")
    assert workspace.train(*SETTINGS) == 0


@pytest.mark.slow(1)
def test_a_folder_in_place_of_a_cache_entry_is_reported(
    workspace: Workspace, capsys: Capture
) -> None:
    assert workspace.run("cache", "fill") == 0
    with workspace.inside():
        folder = next(Path("output/cache/vae").rglob("[0-9a-f][0-9a-f]")).parent
        path = entry_path(folder, next(list_keys(folder)))
        path.unlink()
        path.mkdir()
        (path / "mine.txt").write_text("kept")
    capsys.readouterr()

    assert workspace.run("cache", "verify") == 2
    assert "is a folder where a cache entry belongs; move it away" in capsys.readouterr().out
    for command in (["train"], ["cache", "fill"], ["cache", "gc", "--remove"]):
        code = workspace.run(*command)
        check_answer(code, capsys.readouterr().err, "a folder is in its place; move it away")
    assert workspace.path(str(path / "mine.txt")).read_text() == "kept"


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), "ulimit -n"),
        (OSError(errno.ENFILE, os.strerror(errno.ENFILE)), "ulimit -n"),
        (OSError(errno.EFBIG, os.strerror(errno.EFBIG)), "ulimit -f"),
        (RuntimeError("I/O error: File too large (os error 27)"), "ulimit -f"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
def test_limits_are_recognised_by_cause_and_by_words(error: Exception, named: str) -> None:
    consequence = ValueError("an archive that could not be closed")
    consequence.__context__ = error

    assert named in reached_limit(error)
    assert named in reached_limit(consequence)
    assert reached_limit(ValueError("file too large")) == ""


def test_a_file_that_cannot_be_read_is_not_called_unwritable(tmp_path: Path) -> None:
    source = tmp_path / "source.json"

    with pytest.raises(PermissionError), open_atomically(tmp_path / "target.json"):
        raise PermissionError(errno.EACCES, "Permission denied", str(source))


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()

    with pytest.raises(WriteError, match="a folder is in its place; move it away") as caught:
        write_atomically(tmp_path / "report.html", "text")

    assert not isinstance(caught.value, DiskFullError)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
