"""Workers of pytest-xdist that are forked with everything imported and all tests collected.

Importing and collecting would take ten seconds of CPU time in each worker, and importing five
seconds in each worker whose tests start processes.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

import pytest

from tests.tools.commands import forked_commands


@contextlib.contextmanager
def forked_workers(folder: Path, arguments: Sequence[str]) -> Iterator[str]:
    """The command that xdist starts in place of Python: a fork with all tests collected.

    Args:
        folder: a folder for the files of this context.
        arguments: the tests to collect, as pytest takes them.
    """
    with forked_commands(folder, _work, partial(_collect, arguments)) as program:
        yield shlex.join(program)


def _collect(arguments: Sequence[str]) -> None:
    with (
        Path(os.devnull).open("w") as discarded,
        contextlib.redirect_stdout(discarded),
        contextlib.redirect_stderr(discarded),
    ):
        # The workers report errors of collecting.
        pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *arguments])


def _work() -> None:
    """Do what xdist starts Python for: `-c` and a line of code, which reads the rest."""
    exec(sys.argv[-1], {"__name__": "__main__"})
    atexit._run_exitfuncs()  # a fork ends without them


def fork_the_forkserver() -> None:
    """Start the fork server of multiprocessing as a fork of this process, with all its imports."""
    resource_tracker.ensure_running()  # otherwise the fork server starts one
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork_instead)
        forkserver.ensure_running()


def _fork_instead(path: str, words: Sequence[str], handles: Sequence[int]) -> int:
    """Like `multiprocessing.util.spawnv_passfds`, but with a fork instead of a new Python.

    The main loop of the fork server starts with the first request.
    """
    process = os.fork()
    if process:
        return process
    try:
        _detach(handles)
        listener, lifeline = handles
        ready, _, _ = select.select([listener, lifeline], [], [])
        if listener in ready:
            exec(words[-1], {})
    finally:
        os._exit(0)


def _detach(handles: Sequence[int]) -> None:
    """Give up what this fork has open of its parent, but for some handles and the output."""
    discarded = os.open(os.devnull, os.O_RDWR)
    inherited = {int(path.name) for path in Path("/dev/fd").iterdir()}
    for handle in inherited - {0, 1, 2, discarded, *handles}:
        # Not closed: its number would be given to another file, which its owner would then close.
        os.dup2(discarded, handle)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    logging.root.handlers.clear()  # those of pytest, for the test that runs
