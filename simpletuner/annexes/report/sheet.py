"""The contact sheet of a sweep, and other samples of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter, itemgetter
from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from simpletuner.annexes.figures import Columns, evaluation_names, evaluation_points, still
from simpletuner.annexes.report.html import gallery, grid_order, render
from simpletuner.atomic import open_atomically, write_atomically, write_json
from simpletuner.config.json_reader import read_stored
from simpletuner.errors import UserError
from simpletuner.reporting.metrics import MIME, VIDEO_MIME, MediaRecord

SAMPLES = 48  # newest samples that a page shows
ROW_KEYS = ("prompt", "seed", "index", "width", "height")  # equal for all samples in a row
SWEEP_FOLDER = "sweep"  # in the output folder of its run
PAGE = "sheet.html"
PICTURE = "sheet.png"
CONTENT = "sheet.json"
LOSSES = "losses.json"
# Pixels of the picture.
CELL = 256
MARGIN = 8
FONT_SIZE = 14


@dataclass(frozen=True)
class Sheet:
    """The contact sheet of a sweep.

    Attributes:
        title: name of the run.
        folder: the folder to which paths of records are relative.
        records: the cells: a row per `short_name`, a column per step.
        metrics: metrics of the run.
        losses: evaluation loss of the best checkpoint by strength, if measured.
    """

    title: str
    folder: Path
    records: Sequence[MediaRecord]
    metrics: Columns
    losses: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, title: str, metrics: Columns) -> Sheet:
        """Read the latest sheet of a folder, with the cells rendered so far.

        Raises:
            UserError: the list of cells is damaged.
        """
        planned = read_stored(folder / CONTENT, list[MediaRecord])
        if planned is None and (folder / CONTENT).exists():
            raise UserError(
                f"{folder / CONTENT} is damaged; the next comparison of checkpoints replaces it."
            )
        rendered = [record for record in planned or () if (folder / record.path).is_file()]
        losses = read_stored(folder / LOSSES, dict[str, float])
        return cls(title, folder, rendered, metrics, losses or {})

    def begin(self) -> None:
        """Write the list of planned cells, for pages that show progress."""
        cells = [asdict(record) for record in self.records]
        write_json(self.folder / CONTENT, cells, durable=False)
        # The losses of an earlier sweep may be of another checkpoint.
        write_json(self.folder / LOSSES, {}, durable=False)

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        return sorted({record.step for record in self.records})

    @property
    def best(self) -> int | None:
        """The compared checkpoint with the lowest evaluation loss.

        The loss is interpolated between measured steps. None if no loss was measured, and before a
        cell is rendered.
        """
        points = evaluation_points(self.metrics)
        if not points or not self.records:
            return None
        steps = [step for step, _ in points]
        losses = [loss for _, loss in points]
        return min(self.steps, key=lambda step: float(np.interp(step, steps, losses)))

    @property
    def verdict(self) -> str:
        """A summary of the evaluation loss in one or two sentences."""
        points = evaluation_points(self.metrics)
        if not points:
            return (
                "No evaluation loss was measured, so no checkpoint is marked; eval_steps_interval "
                "measures it."
            )
        best_step, lowest = min(points, key=itemgetter(1))
        last_step, last_loss = points[-1]
        if best_step == last_step:
            summary = (
                f"The evaluation loss is lowest at the last measured step ({lowest:.4g} at step "
                f"{best_step:,})."
            )
        else:
            summary = (
                f"The evaluation loss is lowest at step {best_step:,} ({lowest:.4g}) and then "
                f"rises to {last_loss:.4g} at step {last_step:,}."
            )
        if self.best is None or not self.losses:
            return summary
        losses = [f"{loss:.4g} at strength {strength}" for strength, loss in self.losses.items()]
        return f"{summary} Checkpoint {self.best:,} has {', '.join(losses)}."

    def write(self) -> None:
        """Write `sheet.html` with embedded pictures, `sheet.png` and the losses."""
        write_json(self.folder / LOSSES, self.losses, durable=False)
        kept = {"step", "train_loss", *evaluation_names(self.metrics)}
        content = gallery(self.metrics.only(kept), self.records, self.folder, with_mfu=False)
        page = render("sheet.html.jinja", sheet=self, refresh=None, **content)
        write_atomically(self.folder / PAGE, page, durable=False)
        with open_atomically(self.folder / PICTURE, durable=False) as file:
            self._picture().save(file, "PNG")

    def _picture(self) -> Image.Image:
        """Draw a row per prompt below its name and text, and a column per checkpoint.

        Clips are drawn as their middle frames.
        """
        records = sorted(self.records, key=grid_order)
        line_height = FONT_SIZE + MARGIN
        font = ImageFont.load_default(FONT_SIZE)
        cell_height = max(
            CELL * record.height // max(record.width, record.height) for record in records
        )
        width = (CELL + MARGIN) * len(self.steps) + MARGIN
        line_length = int((width - MARGIN) / font.getlength("n"))  # in characters
        labels: dict[object, list[str]] = {}  # the lines above a row
        for record in records:
            text = f"{record.short_name}: {record.prompt or '(empty prompt)'}"
            labels[record.row] = wrap(text, line_length)
        lines = sum(len(label) for label in labels.values())
        height = line_height * (1 + lines) + cell_height * len(labels)
        sheet = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(sheet)

        left: dict[int, int] = {}  # of a column, by step
        for column, step in enumerate(self.steps):
            left[step] = MARGIN + column * (CELL + MARGIN)
            mark = ", lowest evaluation loss" if step == self.best else ""
            draw.text((left[step], MARGIN // 2), f"step {step:,}{mark}", "black", font)

        top: dict[object, int] = {}  # of the pictures in a row
        y = line_height
        for row, label in labels.items():
            for text in label:
                draw.text((MARGIN, y), text, "black", font)
                y += line_height
            top[row] = y - MARGIN // 2
            y += cell_height
        for record in records:
            picture = ImageOps.contain(still(self.folder / record.path), (CELL, cell_height))
            sheet.paste(picture, (left[record.step], top[record.row]))
        return sheet


@dataclass(frozen=True)
class RenderRecipe:
    """The part of a render's recipe that a page shows; the file beside the render has more keys.

    Attributes:
        step: step of the weights; None for a LoRA file that does not store it.
        strength: strength of the LoRA; 0 is the base model.
    """

    prompt: str
    seed: int
    index: int
    width: int
    height: int
    step: int | None
    strength: float


def cell(recipe: Mapping[str, Any], name: str, path: str) -> MediaRecord:
    """The record of a render, from its recipe."""
    values = {key: recipe[key] for key in ROW_KEYS}
    return MediaRecord(step=recipe["step"] or 0, short_name=name, path=path, **values)


def samples_in(folder: Path) -> list[MediaRecord]:
    """The newest samples in a folder: a row per prompt, seed and strength.

    Renders of the base model have strength 0, and count as step 0 in the rows of all strengths.
    """
    row_of = itemgetter(*ROW_KEYS)
    recipes = recipes_in(folder)
    strengths: dict[tuple[Any, ...], set[float]] = defaultdict(set)  # newest row first
    for recipe in recipes.values():
        row_strengths = strengths[row_of(recipe)]
        if recipe["strength"] != 0:
            row_strengths.add(recipe["strength"])

    records: dict[tuple[Any, ...], MediaRecord] = {}
    for path, recipe in recipes.items():
        rows = [recipe["strength"]]
        if recipe["strength"] == 0:
            recipe = {**recipe, "step": 0}
            rows = sorted(strengths[row_of(recipe)]) or [1]
        for strength in rows:
            title = f"{recipe['prompt']:.50}, seed {recipe['seed']}"
            if strength != 1:
                title += f", at {strength:g}"
            record = cell(recipe, title, path)
            records.setdefault((*record.row, record.step), record)

    newest_first = [*strengths]
    row_of_record = attrgetter(*ROW_KEYS)

    def order(record: MediaRecord) -> tuple[int, str]:
        # The strengths of a prompt stay together.
        return newest_first.index(row_of_record(record)), record.short_name

    return sorted(records.values(), key=order)


def recipes_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The recipes of the newest samples, by file name; other files are ignored."""
    files = [path for path in folder.glob("*") if path.suffix in {*MIME, *VIDEO_MIME}]
    newest = sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)[:SAMPLES]
    recipes = {file.name: read_stored(file.with_suffix(".json"), RenderRecipe) for file in newest}
    return {name: asdict(recipe) for name, recipe in recipes.items() if recipe is not None}
