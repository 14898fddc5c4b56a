"""The previews of a run on the page: one step of all prompts, large; and a grid of all steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.runs.live import chosen
from simpletuner.annexes.report import html
from simpletuner.annexes.report.html import Cell, PreviewGrid, build_grid, grid_rows, pages_of
from simpletuner.annexes.report.html import steps_of as all_steps_of
from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.runs.state import ACTIVE
from simpletuner.errors import UserError
from simpletuner.reporting.metrics import MEDIA_FILE, MediaRecord, describe_damage, read_media

MOST_SHOTS = 48  # prompts that are shown large; the grid has pages with all of them
NO_STEP = "none"  # in place of the step beside which previews are shown


@dataclass(frozen=True)
class LargePreview:
    """The previews of a prompt at a step, of the trained weights and of their moving average.

    Attributes:
        before: the same at the step to compare with; None where it was not rendered.
    """

    name: str
    prompt: str
    after: Sequence[Cell]
    before: Sequence[Cell] | None

    @property
    def step(self) -> int:
        """The step of its previews."""
        return self.after[0].record.step

    @property
    def is_video(self) -> bool:
        """Whether it is a clip."""
        return self.after[0].record.is_video


def address(run: Run, path: str) -> str:
    """The URL of a preview, which changes when the file does; empty if the file is missing."""
    file = run.folder / path
    if not file.is_file():
        return ""
    return f"/media/{run.id}/{quote(path)}?{file.stat().st_mtime_ns}"


def grid_of(run: Run, records: Sequence[MediaRecord], below: str = ".") -> PreviewGrid:
    """A grid of pictures loaded by URL.

    Args:
        below: the folder in the run's folder to which the paths of the records are relative.
    """

    def source(record: MediaRecord) -> str:
        return address(run, f"{below}/{record.path}".removeprefix("./"))

    return build_grid(records, run.folder, source)


def show_previews(request: Request) -> Response:
    """Previews of a run: `?step=200&beside=0` large, and `?page=3` of the grid of all steps.

    `only=shots` leaves out the grid, for a slider that is dragged.
    """
    run = chosen(request)
    asked = request.query_params

    def draw() -> str:
        values = previews(run, asked.get("step", ""), asked.get("beside", ""))
        if asked.get("only") != "shots":
            values |= all_previews(run, asked.get("page", ""))
        return html.render("page/runs/previews.html.jinja", run=run, **values)

    return HTMLResponse(draw_part("Previews", draw))


def previews(run: Run, step: str, beside: str) -> dict[str, Any]:
    """Template values for the previews of one step.

    Args:
        step: the newest one if it is not a step with previews.
        beside: the step to compare with; by default the first one of a run that has ended.
    """
    records = read_media(run.folder / MEDIA_FILE)
    steps = all_steps_of([records])
    is_active = run.status()["status"] in ACTIVE
    shown = step_in(steps, step)
    if shown is None and steps:
        shown = steps[-1]
    before = step_in(steps, beside)
    if before is None and beside != NO_STEP and not is_active and len(steps) > 1:
        before = steps[0]
    rows = grid_rows(records)
    shots = []
    for row in rows[:MOST_SHOTS]:
        shot = large_preview(run, row, shown, before)
        if shot is not None:
            shots.append(shot)
    return {
        "is_active": is_active,
        "steps": steps,
        "step": shown,
        "beside": before,
        "shots": shots,
        "hidden": max(0, len(rows) - MOST_SHOTS),
        "growing": unfinished(run),
        "grid": None,
    }


def step_in(steps: Sequence[int], text: str) -> int | None:
    """The step that a text names; None if there is no such step."""
    matching = [step for step in steps if str(step) == text]
    return matching[0] if matching else None


def large_preview(
    run: Run, row: Sequence[MediaRecord], step: int | None, before: int | None
) -> LargePreview | None:
    """A prompt's previews at a step, or at the last one before it; None if there are none."""
    reached = [record.step for record in row if step is None or record.step <= step]
    if not reached:
        return None
    shown = max(reached)
    compared = None
    if before is not None and before != shown:
        compared = cells_at(run, row, before) or None
    return LargePreview(row[0].short_name, row[0].prompt, cells_at(run, row, shown), compared)


def cells_at(run: Run, row: Sequence[MediaRecord], step: int) -> list[Cell]:
    """A prompt's previews at a step: of the trained weights, then of their moving average."""
    by_weights = {record.ema: record for record in row if record.step == step}
    return [Cell(by_weights[ema], address(run, by_weights[ema].path)) for ema in sorted(by_weights)]


def all_previews(run: Run, page: str) -> dict[str, Any]:
    """Template values for a selection or a page of all previews."""
    records = read_media(run.folder / MEDIA_FILE)
    pages = {str(number): content for number, content in enumerate(pages_of(records))}
    shown = records
    if page in pages:
        _title, shown = pages[page]
    return {
        "grid": grid_of(run, shown),
        "pages": pages,
        "page": page if page in pages else "",
        "damage": describe_damage(run.folder / MEDIA_FILE),
    }


def unfinished(run: Run) -> list[dict[str, Any]]:
    """The previews that a run is sampling at present."""
    with suppress(OSError, UserError):  # a damaged lock, which the status reports
        verdict = run.judge()
        if verdict.status == "running":
            growing = verdict.history.growing.values()
            return [{**preview, "source": address(run, preview["path"])} for preview in growing]
    return []
