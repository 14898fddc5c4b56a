"""The end of `console.log`: the output of a command, and its errors."""

from __future__ import annotations

import re
from pathlib import Path

from simpletuner.annexes.payloads import last_lines
from simpletuner.redaction import redact

CONSOLE_FILE = "console.log"
CONSOLE_PART = 1 << 16  # bytes at the end of the log that are read
PROMPT = "$ simpletuner "  # prefix of the line with the command of a session
# The last line of an interrupted command; the second one if Python was still starting.
INTERRUPTED = ("Interrupted.", "KeyboardInterrupt")


def output_end(file: Path) -> str:
    """The end of a command's output, without secrets and overwritten progress bars."""
    text = b"".join(last_lines(file, CONSOLE_PART)).decode(errors="replace")
    # A progress bar overwrites its line after a carriage return.
    lines = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return redact("\n".join(lines))


def last_message(console: str, *, only_errors: bool = False) -> str:
    """The errors of the newest session in a console.log, or else its last line."""
    sessions = re.split(rf"^{re.escape(PROMPT)}.*$", console, flags=re.MULTILINE)
    lines = sessions[-1].strip().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors or only_errors:
        return "\n".join(errors)
    return "\n".join(lines[-1:])
