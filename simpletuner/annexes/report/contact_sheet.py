"""Writes the contact sheet of a comparison: one page, and one picture."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from PIL import Image, ImageDraw, ImageFont, ImageOps

from simpletuner.annexes.figures import evaluation_names, still
from simpletuner.annexes.report.comparison import build_table
from simpletuner.annexes.report.html import curves, embedding, grid_order, render
from simpletuner.annexes.report.sheet import Sheet, SheetCell
from simpletuner.atomic import open_atomically, write_atomically

PAGE = "sheet.html"
PICTURE = "sheet.png"
# Pixels of the picture.
CELL = 256
MARGIN = 8
FONT_SIZE = 14
LINE = FONT_SIZE + MARGIN


def write_sheet(sheet: Sheet) -> None:
    """Write `sheet.html`, with embedded pictures, and `sheet.png`."""
    kept = {"step", "train_loss", *evaluation_names(sheet.metrics)}
    source = embedding(sheet.folder, len(sheet.cells))
    page = render(
        "sheet.html.jinja",
        sheet=sheet,
        refresh=None,
        scripts=("curves.js", "viewer.js", "page.js"),
        table=build_table(sheet, source),
        **curves(sheet.metrics.only(kept), with_mfu=False),
    )
    write_atomically(sheet.folder / PAGE, page, durable=False)
    with open_atomically(sheet.folder / PICTURE, durable=False) as file:
        draw_sheet(sheet).save(file, "PNG")


def draw_sheet(sheet: Sheet) -> Image.Image:
    """A row per prompt and strength below its name and text, and a column per checkpoint.

    Clips are drawn as their middle frames.
    """
    cells = sorted(sheet.records, key=lambda cell: (grid_order(cell), cell.strength))
    steps = sorted({cell.step for cell in cells})
    font = ImageFont.load_default(FONT_SIZE)
    cell_height = max(CELL * cell.height // max(cell.width, cell.height) for cell in cells)
    width = (CELL + MARGIN) * len(steps) + MARGIN
    line_length = int((width - MARGIN) / font.getlength("n"))  # in characters
    labels: dict[Any, list[str]] = {}  # the lines above a row
    for cell in _rows(cells):
        labels[cell.prompt_key, cell.strength] = wrap(_label(sheet, cell), line_length)
    lines = sum(len(label) for label in labels.values())
    height = LINE * (1 + lines) + cell_height * len(labels)
    picture = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(picture)

    left: dict[int, int] = {}  # of a column, by step
    for column, step in enumerate(steps):
        left[step] = MARGIN + column * (CELL + MARGIN)
        draw.text((left[step], MARGIN // 2), _heading(sheet, step), "black", font)

    y = LINE
    for (prompt, strength), label in labels.items():
        for text in label:
            draw.text((MARGIN, y), text, "black", font)
            y += LINE
        for cell in cells:
            is_in_row = cell.step == 0 or cell.strength == strength
            if cell.prompt_key == prompt and is_in_row:
                shown = ImageOps.contain(still(sheet.folder / cell.path), (CELL, cell_height))
                picture.paste(shown, (left[cell.step], y - MARGIN // 2))
        y += cell_height
    return picture


def _heading(sheet: Sheet, step: int) -> str:
    """What stands above a column."""
    if step == 0:
        return "untrained"
    mark = ", lowest held-out loss" if step == sheet.best else ""
    return f"step {step:,}{mark}"


def _rows(cells: list[SheetCell]) -> list[SheetCell]:
    """A cell of each row: the untrained model has no row of its own, unless nothing else has."""
    return [cell for cell in cells if cell.step] or cells


def _label(sheet: Sheet, cell: SheetCell) -> str:
    text = f"{cell.short_name}: {cell.prompt or '(empty prompt)'}"
    if len(sheet.strengths) > 1:
        return f"At {cell.strength:g}, {text}"
    return text
