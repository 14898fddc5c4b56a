"""Samples of a run: its newest renders besides previews and comparisons."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from simpletuner.config.json_reader import read_stored
from simpletuner.reporting.metrics import MIME, VIDEO_MIME, MediaRecord

SAMPLES_FOLDER = "samples"  # of the page's samples, in the output folder
SAMPLES = 48  # newest samples that a page shows
ROW_KEYS = ("prompt", "seed", "index", "width", "height")  # equal for all samples in a row


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
            values = {key: recipe[key] for key in ROW_KEYS}
            record = MediaRecord(recipe["step"] or 0, title, path=path, **values)
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
