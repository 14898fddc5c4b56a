"""The last line of `train` and `start`: what to do next with the run."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from simpletuner.annexes.display.progress import LastingStream
from simpletuner.annexes.runs.next_step import next_step_of
from simpletuner.annexes.runs.run import Run
from simpletuner.errors import UserError


def print_next_step(folder: Path) -> None:
    """Print what to do next with the run in a folder; nothing where its record does not decide."""
    # The run is over: a damaged record must not make its success look like a failure.
    with suppress(OSError, UserError):
        step = next_step_of(Run(folder.name, folder))
        if step is not None:
            print(step.in_terminal(folder), file=LastingStream(sys.stdout), flush=True)
