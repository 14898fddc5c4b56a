"""What a terminal can show."""

from __future__ import annotations

import os
from typing import TextIO


def is_screen(stream: TextIO) -> bool:
    """Whether a stream is a terminal that supports cursor movement and colours."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def in_red(text: str, stream: TextIO) -> str:
    """The text in red where the stream shows colours and NO_COLOR does not forbid them
    (https://no-color.org).
    """
    return (
        f"\x1b[31m{text}\x1b[0m" if is_screen(stream) and not os.environ.get("NO_COLOR") else text
    )
