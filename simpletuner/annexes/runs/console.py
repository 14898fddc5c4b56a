"""The end of `console.log`: what a command printed, and its errors."""

from __future__ import annotations

import re
from pathlib import Path

from simpletuner.annexes.payloads import last_lines
from simpletuner.redaction import redact

CONSOLE_FILE = "console.log"
CONSOLE_PART = 1 << 16  # bytes at the end of the log that are read
PROMPT = "$ simpletuner "  # prefix of the line with the command of a session
INTERRUPTED = (
    "Interrupted.",
    "KeyboardInterrupt",
)  # last line; the second if Python was still starting


def printed(file: Path) -> str:
    """The end of a command's output, without secrets and overwritten progress bars."""
    lines = b"".join(last_lines(file, CONSOLE_PART)).decode(errors="replace").split("\n")
    return redact("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))


def said_at_the_end(console: str, *, only_errors: bool = False) -> str:
    """The errors of the newest session in a console.log, or else its last line."""
    lines = (
        re.split(rf"^{re.escape(PROMPT)}.*$", console, flags=re.MULTILINE)[-1].strip().splitlines()
    )
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return "\n".join(errors or ([] if only_errors else lines[-1:]))
