"""The contact sheet of a sweep, and other samples of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
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
SAME = ("prompt", "seed", "index", "width", "height")  # equal for all samples in a row
SWEEP_FOLDER = "sweep"  # in the output folder of its run
PAGE = "sheet.html"
PICTURE = "sheet.png"
CONTENT = "sheet.json"
LOSSES = "losses.json"
# of the picture, in pixels
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
        """Read the latest sheet of a folder, with the cells rendered so far; without records if
        there is none.

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
        write_json(
            self.folder / CONTENT, [asdict(record) for record in self.records], durable=False
        )
        write_json(
            self.folder / LOSSES, {}, durable=False
        )  # an earlier sweep's losses may be of another checkpoint

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, in order."""
        return sorted({record.step for record in self.records})

    @property
    def best(self) -> int | None:
        """The compared checkpoint with the lowest evaluation loss, interpolated between measured
        steps.

        None without a measured loss, and before a cell is rendered.
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
        low, least = min(points, key=lambda point: point[1])
        last, loss = points[-1]
        if low == last:
            summary = (
                f"The evaluation loss is lowest at the last measured step ({least:.4g} at step "
                f"{low:,})."
            )
        else:
            rise = f"then rises to {loss:.4g} at step {last:,}"
            summary = f"The evaluation loss is lowest at step {low:,} ({least:.4g}) and {rise}."
        by_strength = ", ".join(
            f"{loss:.4g} at strength {strength}" for strength, loss in self.losses.items()
        )
        if self.best is None or not by_strength:
            return summary
        return f"{summary} Checkpoint {self.best:,} has {by_strength}."

    def write(self) -> None:
        """Write `sheet.html` with embedded pictures, `sheet.png` and the losses."""
        write_json(self.folder / LOSSES, self.losses, durable=False)
        kept = {"step", "train_loss", *evaluation_names(self.metrics)}
        shown = gallery(self.metrics.only(kept), self.records, self.folder, with_mfu=False)
        page = render("sheet.html.jinja", sheet=self, refresh=None, **shown)
        write_atomically(self.folder / PAGE, page, durable=False)
        with open_atomically(self.folder / PICTURE, durable=False) as file:
            self._picture().save(file, "PNG")

    def _picture(self) -> Image.Image:
        """Draw a row per prompt under its name and text, and a column per checkpoint; clips as
        middle frames.
        """
        records = sorted(self.records, key=grid_order)
        line = FONT_SIZE + MARGIN
        font = ImageFont.load_default(FONT_SIZE)
        height = max(CELL * record.height // max(record.width, record.height) for record in records)
        width = (CELL + MARGIN) * len(self.steps) + MARGIN
        letters = int((width - MARGIN) / font.getlength("n"))
        labels = {
            record.row: wrap(f"{record.short_name}: {record.prompt or '(empty prompt)'}", letters)
            for record in records
        }
        tops = list(
            accumulate((height + line * len(label) for label in labels.values()), initial=line)
        )
        sheet = Image.new("RGB", (width, tops[-1]), "white")
        draw = ImageDraw.Draw(sheet)
        left = {step: MARGIN + column * (CELL + MARGIN) for column, step in enumerate(self.steps)}
        for step in self.steps:
            mark = ", lowest evaluation loss" if step == self.best else ""
            draw.text((left[step], MARGIN // 2), f"step {step:,}{mark}", "black", font)
        cells: dict[object, int] = {}
        for (row, label), top in zip(labels.items(), tops, strict=False):
            cells[row] = top + line * len(label) - MARGIN // 2
            for number, text in enumerate(label):
                draw.text((MARGIN, top + line * number), text, "black", font)
        for record in records:
            fitted = ImageOps.contain(still(self.folder / record.path), (CELL, height))
            sheet.paste(fitted, (left[record.step], cells[record.row]))
        return sheet


@dataclass(frozen=True)
class RenderRecipe:
    """What a page shows of a render's recipe; the file beside the render has more keys.

    Attributes:
        step: of the weights; None for a LoRA file that does not say.
        strength: of the LoRA; 0 is the base model.
    """

    prompt: str
    seed: int
    index: int
    width: int
    height: int
    step: int | None
    strength: float


def cell(made: Mapping[str, Any], name: str, path: str) -> MediaRecord:
    """The record of a render, from its recipe."""
    shown = {key: made[key] for key in ("width", "height", "seed", "index", "prompt")}
    return MediaRecord(step=made["step"] or 0, short_name=name, path=path, **shown)


def samples_in(folder: Path) -> list[MediaRecord]:
    """The newest samples in a folder: a row per prompt, seed and strength; the base model counts as
    step 0.
    """
    made = recipes_in(folder)
    strengths: dict[tuple[Any, ...], set[float]] = defaultdict(set)
    for recipe in made.values():
        strengths[itemgetter(*SAME)(recipe)] |= {recipe["strength"]} - {0}
    records: dict[tuple[Any, ...], MediaRecord] = {}
    for name, recipe in made.items():
        is_untrained = recipe["strength"] == 0
        # Renders of the base model belong to the rows of all strengths.
        rows = (
            sorted(strengths[itemgetter(*SAME)(recipe)]) or [1]
            if is_untrained
            else [recipe["strength"]]
        )
        for strength in rows:
            title = f"{recipe['prompt']:.50}, seed {recipe['seed']}" + (
                f", at {strength:g}" if strength != 1 else ""
            )
            record = cell({**recipe, "step": 0} if is_untrained else recipe, title, name)
            records.setdefault((*record.row, record.step), record)
    newest = [*strengths]  # the strengths of a prompt stay together
    return sorted(
        records.values(), key=lambda each: (newest.index(attrgetter(*SAME)(each)), each.short_name)
    )


def recipes_in(folder: Path) -> dict[str, dict[str, Any]]:
    """The recipes of the newest samples, by file name; other files are ignored."""
    files = [path for path in folder.glob("*") if path.suffix in {*MIME, *VIDEO_MIME}]
    newest = sorted(files, key=lambda file: file.stat().st_mtime_ns, reverse=True)[:SAMPLES]
    recipes = {file.name: read_stored(file.with_suffix(".json"), RenderRecipe) for file in newest}
    return {name: asdict(recipe) for name, recipe in recipes.items() if recipe is not None}
