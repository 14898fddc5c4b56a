"""What a terminal can show."""

from __future__ import annotations

import os
import shutil
from typing import TextIO

from simpletuner.reporting.layout import Layout


def is_screen(stream: TextIO) -> bool:
    """Whether a stream is a terminal that supports cursor movement and colours."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def in_red(text: str, stream: TextIO) -> str:
    """The text in red, if the stream shows colours and NO_COLOR (https://no-color.org) is unset."""
    if not is_screen(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[31m{text}\x1b[0m"


def layout_of(stream: TextIO) -> Layout:
    """The layout of text for a stream: as wide as its terminal, or as COLUMNS demands."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdigit() and int(columns) > 0:
        return Layout(int(columns))
    if not stream.isatty():
        return Layout()
    return Layout(shutil.get_terminal_size().columns)
