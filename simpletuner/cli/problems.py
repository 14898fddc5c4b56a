"""Prints problems: errors before warnings, each once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO

from simpletuner.errors import Problem
from simpletuner.redaction import redact
from simpletuner.reporting.screen import in_red, layout_of


def print_problems(problems: Iterable[Problem], stream: TextIO) -> None:
    """Print the errors, then the warnings, in the width of the terminal."""
    layout = layout_of(stream)
    once = dict.fromkeys(problems)
    for problem in once:
        if problem.fatal:
            for line in layout.wrap(redact(f"error: {problem}")):
                print(in_red(line, stream), file=stream)
    for problem in once:
        if not problem.fatal:
            for line in layout.wrap(redact(f"warning: {problem}")):
                print(line, file=stream)
