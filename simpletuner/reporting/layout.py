"""Text in the width of a terminal: wrapped prose, shortened values, and tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# Takes the place of the middle of a long value.
ELLIPSIS = "…"
# Stands for a blank that must not become the end of a line.
GLUE = "\0"
# The gaps between the columns of a table, the widest that fits the terminal.
GAPS = (4, 3, 2, 1)


@dataclass(frozen=True)
class Layout:
    """Lays out text.

    Attributes:
        width: columns of the terminal. None for a file or a pipe: no line is broken, and nothing is
            shortened, so that programs find what they look for.
    """

    width: int | None = None

    def wrap(self, text: str, indent: int = 0, hanging: int = 2) -> Iterator[str]:
        """The lines of a sentence, all but the first indented by `hanging` more columns.

        Words, and commands between backticks, are never broken.
        """
        if self.width is None or indent + len(text) <= self.width:
            yield " " * indent + text
            return
        glued = re.sub(r"`[^`]*`", lambda command: command[0].replace(" ", GLUE), text)
        lines = textwrap.wrap(
            glued,
            self.width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hanging),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines:
            yield line.replace(GLUE, " ")

    def wrap_lines(self, text: str) -> str:
        """A text of several lines with each of them wrapped; their indents stay."""
        lines: list[str] = []
        for line in text.splitlines() or [""]:
            content = line.lstrip()
            lines += self.wrap(content, len(line) - len(content))
        return "\n".join(lines)

    def shorten(self, text: str, used: int) -> str:
        """The text without its middle, if it does not fit beside `used` columns."""
        if self.width is None:
            return text
        room = max(self.width - used, 3)
        if len(text) <= room:
            return text
        head = (room - len(ELLIPSIS)) // 2
        tail = room - len(ELLIPSIS) - head
        return text[:head] + ELLIPSIS + text[len(text) - tail :]

    def pairs(self, rows: Iterable[tuple[str, str]], column: int = 0) -> Iterator[str]:
        """Names with their values; a long path loses its middle, and a sentence is wrapped.

        Args:
            rows: names and values.
            column: the least width of the names.
        """
        rows = list(rows)
        widest = max([column, *(len(name) for name, _ in rows)])
        for name, value in rows:
            start = f"  {name:<{widest}}  "
            if " " not in value:
                yield start + self.shorten(value, len(start))
                continue
            first, *further = self.wrap(value, len(start), hanging=0)
            yield start + first.lstrip()
            yield from further

    def table(self, rows: Sequence[Sequence[str]]) -> Iterator[str]:
        """Rows of cells: the first to the left, the others to the right of their column."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        gap = GAPS[-1]
        for gap in GAPS:
            total = 2 + sum(widths) + gap * (len(widths) - 1)
            if total <= (self.width or 80):
                break
        first, *others = widths
        for name, *cells in rows:
            line = f"  {name:<{first}}"
            for cell, width in zip(cells, others, strict=True):
                line += f"{cell:>{gap + width}}"
            yield line
