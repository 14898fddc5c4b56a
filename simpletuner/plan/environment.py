"""Environment variables that say something about a run and are no settings."""

from __future__ import annotations

import os
from collections.abc import Iterator

from simpletuner.config.option import parse_flag
from simpletuner.errors import Problem, UserError
from simpletuner.reporting.log import log_level

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
    for name in WITHOUT_EFFECT:
        if os.environ.get(name):
            yield Problem(name, "has no effect yet: one process trains on one device, without a launcher.", fatal=False)


def allows_other_batch_size() -> bool:
    """Whether a run may be resumed with another batch size."""
    try:
        return bool(parse_flag(os.environ.get(ALLOW_OTHER_BATCH_SIZE) or "0"))
    except ValueError:
        return False
