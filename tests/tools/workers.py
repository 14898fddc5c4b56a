"""Processes of the tests that are forked with everything imported: to import and to collect it
takes ten seconds of a processor for each worker of pytest-xdist, and five for each that starts
processes of its own."""

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
    """What xdist starts in place of Python: forks of a process that has collected the tests.

    Args:
        folder: for files of its own.
        arguments: what pytest is to collect.
    """
    with forked_commands(folder, _work, partial(_collect, arguments)) as program:
        yield shlex.join(program)


def _collect(arguments: Sequence[str]) -> None:
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        pytest.main(
            ["--collect-only", "-qq", "-p", "no:cacheprovider", *arguments]
        )  # what is wrong, workers tell


def _work() -> None:
    """What xdist has Python do: `-c`, and a line that reads the rest."""
    exec(sys.argv[-1], {"__name__": "__main__"})
    atexit._run_exitfuncs()  # a fork ends without


def fork_the_forkserver() -> None:
    """Let multiprocessing's server of forks be one itself, of this process as it is now."""
    resource_tracker.ensure_running()  # which the other would start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork_instead)
        forkserver.ensure_running()


def _fork_instead(path: str, words: Sequence[str], handles: Sequence[int]) -> int:
    """Like `multiprocessing.util.spawnv_passfds`, with the main loop begun when a process is asked
    for.
    """
    process = os.fork()
    if process:
        return process
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for handle in {int(path.name) for path in Path("/dev/fd").iterdir()} - {
            0,
            1,
            2,
            nowhere,
            *handles,
        }:
            os.dup2(
                nowhere, handle
            )  # were it closed, its number would be another's when its owner closes it
        sys.stdout, sys.stderr = (
            os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2)
        )
        logging.root.handlers.clear()  # pytest's, for the test that runs
        listener, lifeline = handles
        if listener in select.select([listener, lifeline], [], [])[0]:
            exec(words[-1], {})
    finally:
        os._exit(0)
