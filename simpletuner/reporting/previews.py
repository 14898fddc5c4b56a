"""The previews of a run as a grid, with the pictures embedded in the page.

The page should stay small enough to mail, so rows, columns and bytes per picture are limited. The first and the last
step are always kept.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from PIL import Image

from simpletuner.reporting.metrics import MIME, VIDEO_MIME, MediaRecord

Item = TypeVar("Item")

# Short name of `validation_prompt`.
MAIN_PROMPT = "validation"
ROWS = 24
CELLS = 96
FEWEST_COLUMNS = 4
# Bytes of all previews; base64 adds a third.
BUDGET = 6_000_000
SIDES = (1024, 768, 512, 384, 256, 128)
QUALITY = 82
THUMBNAIL_SIDE = 320
# What a smooth photograph takes at that quality; larger sides need not be tried for a smaller allowance.
FEWEST_BYTES_PER_PIXEL = 0.08


@dataclass(frozen=True)
class Cell:
    """One preview in the page.

    Attributes:
        source: a data URI; for a video too large to embed, its path relative to the page; empty if the file is gone.
    """

    record: MediaRecord
    source: str


@dataclass(frozen=True)
class Row:
    """One prompt over the steps; None at steps where it was not rendered.

    Attributes:
        plain: rendered with the trained weights.
        averaged: rendered with the EMA weights at the same steps; empty if there are none.
    """

    name: str
    prompt: str
    plain: Sequence[Cell | None]
    averaged: Sequence[Cell | None] = ()


@dataclass(frozen=True)
class PreviewGrid:
    """What the page shows, and how much was left out of it."""

    steps: Sequence[int]
    rows: Sequence[Row]
    hidden_steps: int = 0
    hidden_rows: int = 0

    @property
    def compares(self) -> bool:
        """Whether a row has two previews to compare."""
        return any(sum(bool(cell and cell.source) for cell in cells) > 1 for cells in self._cells)

    @property
    def has_video(self) -> bool:
        return any(cell.record.is_video for cells in self._cells for cell in cells if cell)

    @property
    def _cells(self) -> list[Sequence[Cell | None]]:
        return [cells for row in self.rows for cells in (row.plain, row.averaged)]


@dataclass(frozen=True)
class TrainingSample:
    """A picture or clip of the dataset, cropped as it is trained.

    Attributes:
        source: the picture, or the first frame of a clip, as a data URI.
        captions: the alternatives.
        edited_from: the source picture of a pair, as a data URI; empty if there is none.
    """

    name: str
    source: str
    captions: Sequence[str]
    is_clip: bool = False
    edited_from: str = ""


def build_grid(
    records: Sequence[MediaRecord], output_dir: Path, link: Callable[[MediaRecord], str] | None = None
) -> PreviewGrid:
    """Choose rows and columns and embed their pictures: `validation_prompt` first, the empty prompt last.

    Args:
        records: all previews of the run.
        output_dir: their paths are relative to it.
        link: the address of a preview, for pages that are served and embed none.
    """
    by_row: dict[tuple[str, int, int, int], list[MediaRecord]] = {}
    for record in records:
        by_row.setdefault(record.row, []).append(record)
    shown = sorted(by_row.values(), key=lambda row: grid_order(row[0]))[:ROWS]
    all_steps = sorted({record.step for row in shown for record in row})
    lines = sum(len({record.ema for record in row}) for row in shown)
    steps = choose_steps(all_steps, max(FEWEST_COLUMNS, CELLS // max(1, lines)))
    allowance = _allowance(sum(record.step in steps for row in shown for record in row))
    source = link or partial(_source, output_dir=output_dir, allowance=allowance)
    rows = [_build_row(row, steps, source) for row in shown]
    return PreviewGrid(steps, rows, len(all_steps) - len(steps), len(by_row) - len(shown))


def grid_order(record: MediaRecord) -> tuple[bool, bool]:
    """Sorts `validation_prompt` to the front, at whatever strength, and the empty prompt to the end."""
    return not record.prompt, record.short_name.partition(" ")[0] != MAIN_PROMPT


def _build_row(records: Sequence[MediaRecord], steps: Sequence[int], source: Callable[[MediaRecord], str]) -> Row:
    def cells(averaged: bool) -> list[Cell | None]:
        by_step = {record.step: record for record in records if record.ema == averaged}
        return [Cell(by_step[step], source(by_step[step])) if step in by_step else None for step in steps]

    averaged = cells(True) if any(record.ema for record in records) else ()
    return Row(records[0].short_name, records[0].prompt, cells(False), averaged)


def thumbnail(picture: Image.Image, side: int = THUMBNAIL_SIDE) -> str:
    """A small copy of a training picture as a data URI."""
    return _data_uri("image/webp", _webp(picture.convert("RGB"), side))


def choose_steps(steps: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of the sorted steps: the first, the last and evenly spaced ones in between."""
    if len(steps) <= limit:
        return list(steps)
    span = steps[-1] - steps[0]
    wanted = (steps[0] + index * span / (limit - 1) for index in range(limit))
    return sorted({min(steps, key=lambda step: (abs(step - target), step)) for target in wanted})


def _allowance(count: int) -> int:
    """Bytes for one of `count` pictures, which changes only when `count` doubles: a change re-encodes all of them."""
    return BUDGET // (1 << max(0, count - 1).bit_length())


def _source(record: MediaRecord, output_dir: Path, allowance: int) -> str:
    path = output_dir / record.path
    try:
        modified = path.stat().st_mtime_ns
    except OSError:
        return ""
    return _pack(path, record.path, modified, allowance)


@lru_cache(maxsize=4 * CELLS)
def _pack(path: Path, relative: str, modified: int, allowance: int) -> str:
    """The file itself if it is small enough, else the largest reduced copy that is, or the address of a video.

    `modified` is a cache key.
    """
    suffix = path.suffix.lower()
    mime = (MIME | VIDEO_MIME).get(suffix)
    if mime and path.stat().st_size <= allowance:
        return _data_uri(mime, path.read_bytes())
    if suffix in VIDEO_MIME:
        return quote(relative)
    try:
        with Image.open(path) as picture:
            return _data_uri("image/webp", _smaller_copy(picture.convert("RGB"), allowance))
    except (OSError, ValueError):
        return ""


def _smaller_copy(picture: Image.Image, allowance: int) -> bytes:
    """The picture at the largest side length at which it fits; sides that certainly do not fit are skipped."""
    content = b""
    for side in [side for side in SIDES if side**2 * FEWEST_BYTES_PER_PIXEL <= allowance] or SIDES[-1:]:
        content = _webp(picture, side)
        if len(content) <= allowance:
            break
    return content


def _webp(picture: Image.Image, side: int) -> bytes:
    """The picture, reduced in place to a side length at most."""
    picture.thumbnail((side, side), reducing_gap=2.0)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", quality=QUALITY, method=2)
    return buffer.getvalue()


def _data_uri(mime: str, content: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"


def evenly_spaced(count: int, items: Sequence[Item]) -> list[Item]:
    """At most `count` items, evenly spaced."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]
