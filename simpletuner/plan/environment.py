"""What the machine says about a run: environment variables that are no settings, folders that can be written to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from simpletuner.config.option import parse_flag
from simpletuner.errors import Problem, UserError
from simpletuner.reporting.log import log_level
from simpletuner.world import launched_sizes

ALLOW_OTHER_BATCH_SIZE = "SIMPLETUNER_ALLOW_MODIFYING_BSZ"
WITHOUT_EFFECT = ("ACCELERATE_EXTRA_ARGS",)


def check_environment() -> Iterator[Problem]:
    """Variables whose value cannot be used, and those that nothing here listens to."""
    try:
        parse_flag(os.environ.get(ALLOW_OTHER_BATCH_SIZE) or "0")
    except ValueError:
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
    for name in WITHOUT_EFFECT:
        if os.environ.get(name):
            yield Problem(name, "has no effect yet: one process trains on one device, without a launcher.", fatal=False)


def allows_other_batch_size() -> bool:
    """Whether a run may be resumed with another batch size."""
    try:
        return bool(parse_flag(os.environ.get(ALLOW_OTHER_BATCH_SIZE) or "0"))
    except ValueError:
        return False


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def why_no_folder(key: str, folder: Path) -> Problem | None:
    """Why a folder that a key names cannot be one; None where it can. A complete cache may well be read-only."""
    parent = existing(folder)
    if parent.is_dir():
        return None
    return Problem(key, f"{str(folder)!r} cannot be a folder: {str(parent)!r} is a file.")


def why_not_writable(key: str, folder: Path) -> Problem | None:
    """Why a folder that a key names cannot be made or written to; None where it can."""
    parent = existing(folder)
    problem = why_no_folder(key, folder)
    if problem is not None:
        return problem
    if not os.access(parent, os.W_OK | os.X_OK):
        return Problem(key, f"{str(folder)!r} cannot be written to (no permission in {str(parent)!r}).")
    return None
