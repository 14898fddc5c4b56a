"""Checks of the machine: environment variables that are not settings, and folders that must be writable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from simpletuner.config.option import parse_flag
from simpletuner.errors import Problem, UserError
from simpletuner.reporting.log import log_level
from simpletuner.world import launched_sizes

ALLOW_OTHER_BATCH_SIZE = "SIMPLETUNER_ALLOW_MODIFYING_BSZ"
WITHOUT_EFFECT = "ACCELERATE_EXTRA_ARGS"


def check_environment() -> Iterator[Problem]:
    """Variables with an invalid value or without effect."""
    if _other_batch_size() is None:
        message = f"{os.environ[ALLOW_OTHER_BATCH_SIZE]!r} is not 0 or 1."
        yield Problem(ALLOW_OTHER_BATCH_SIZE, message)
    try:
        log_level()
    except UserError as error:
        where, _, message = str(error).partition(": ")
        yield Problem(where, message)
    for name, size in launched_sizes(os.environ).items():
        message = (
            f"is {size}: this was started as several processes (torchrun, accelerate launch, mpirun), and training on "
            "several processes is not available yet. They would repeat each other's work in one output_dir. Start "
            "`simpletuner train` by itself, or unset the variable."
        )
        yield Problem(name, message)
    if os.environ.get(WITHOUT_EFFECT):
        message = "has no effect yet: one process trains on one device, without a launcher."
        yield Problem(WITHOUT_EFFECT, message, fatal=False)


def allows_other_batch_size() -> bool:
    """Whether a run may be resumed with another batch size."""
    return bool(_other_batch_size())


def _other_batch_size() -> object | None:
    """The variable as a flag; None if it is not one."""
    try:
        return parse_flag(os.environ.get(ALLOW_OTHER_BATCH_SIZE) or "0")
    except ValueError:
        return None


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def why_no_folder(key: str, folder: Path) -> Problem | None:
    """Why the path that a key names cannot be a folder, or None. A complete cache may be read-only."""
    parent = existing(folder)
    if parent.is_dir():
        return None
    return Problem(key, f"{str(folder)!r} cannot be a folder: {str(parent)!r} is a file.")


def why_not_writable(key: str, folder: Path) -> Problem | None:
    """Why the folder that a key names cannot be created or written to, or None."""
    parent = existing(folder)
    if not parent.is_dir() or os.access(parent, os.W_OK | os.X_OK):
        return why_no_folder(key, folder)
    return Problem(key, f"{str(folder)!r} cannot be written to (no permission in {str(parent)!r}).")
