"""The result of a run on the page: its files, the table of checkpoints, and its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from simpletuner.annexes.figures import is_number
from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.project import Project, Refusal, project_of
from simpletuner.annexes.page.runs.chosen_file import SavedWeights, choice_of
from simpletuner.annexes.page.runs.comparing import (
    compare_form,
    comparison_under_way,
    preview_cells,
)
from simpletuner.annexes.page.runs.live import chosen, runs_of
from simpletuner.annexes.page.runs.previews import address, grid_of
from simpletuner.annexes.page.runs.stars import LONGEST_NAME, Star, by_weights, read_stars, set_star
from simpletuner.annexes.report import html
from simpletuner.annexes.report.comparison import Shown, build_table
from simpletuner.annexes.report.contact_sheet import PAGE as SHEET_PAGE
from simpletuner.annexes.report.samples import SAMPLES_FOLDER, samples_in
from simpletuner.annexes.report.sheet import Sheet, SheetCell, best_of
from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.runs.state import ACTIVE
from simpletuner.errors import UserError
from simpletuner.planning.checkpoint_folder import SWEEP_FOLDER
from simpletuner.reporting.wording import size_text


def show_results(request: Request) -> Response:
    """The result of a run: its best file, the table of its checkpoints, and its samples."""
    run = chosen(request)
    return HTMLResponse(
        "".join(
            [
                draw_result(run, "result", "Result", lambda: result(run)),
                draw_result(run, "table", "Checkpoints compared", lambda: table(run, request)),
                draw_result(run, "samples", "Samples", lambda: samples(run)),
            ]
        )
    )


def draw_result(run: Run, part: str, title: str, values: Callable[[], dict[str, Any]]) -> str:
    """A part as HTML.

    Args:
        values: computes the template values; an error becomes a notice in place of the part.
    """
    return draw_part(
        title, lambda: html.render("page/runs/table.html.jinja", part=part, run=run, **values())
    )


# ---- The result ----


def result(run: Run) -> dict[str, Any]:
    """Template values for the file that most users want."""
    saved = SavedWeights.of(run.folder)
    values: dict[str, Any] = {"saved": saved, "step": None, "strength": 1.0, "best": False}
    if not saved.steps:
        return values
    step = saved.result or saved.steps[-1]
    best = None
    with suppress(UserError):  # a damaged comparison, which its own part reports
        sheet, _shown = sheet_of(run, saved)
        # Of all that can be used, also those without pictures.
        best = best_of(sheet.metrics, saved.steps)
        if best is not None:
            step = best
            values["strength"] = sheet.best_strength if sheet.best == step else 1.0
    choice = choice_of(run, str(step), ema=False)
    size = "" if choice.is_full else size_text(choice.path.stat().st_size)
    return {
        **values,
        "step": step,
        "best": best is not None,
        "choice": choice,
        "size": size,
        "is_wanted": is_wanted(run),
    }


def is_wanted(run: Run) -> bool:
    """Whether the file is what one most likely wants: no run goes on, or could be continued."""
    status = run.status()
    if status["status"] == "completed":
        return True
    return status["status"] not in ACTIVE and not status["can"]["continue"]


def samples(run: Run) -> dict[str, Any]:
    """Template values for the samples of a run, and for the form that makes some."""
    records = samples_in(run.folder / SAMPLES_FOLDER)
    saved = SavedWeights.of(run.folder)
    return {"sampled": grid_of(run, records, SAMPLES_FOLDER), "saved": saved}


# ---- The table ----


def sheet_of(run: Run, saved: SavedWeights) -> tuple[Sheet, Shown]:
    """The comparison of a run, or else its previews, and what is to be said of their weights.

    Paths are relative to the output folder.

    Raises:
        UserError: the comparison is damaged.
    """
    sheet = Sheet.read(run.folder / SWEEP_FOLDER, run.name, run.metrics)
    previews = preview_cells(run)
    if sheet.cells:
        cells = [replace(cell, path=f"{SWEEP_FOLDER}/{cell.path}") for cell in sheet.cells]
        cells += untrained_beside(cells, previews)
    else:
        cells = previews
    shown = Shown(saved.steps, notes_of(cells, saved))
    return replace(sheet, folder=run.folder, cells=cells), shown


def untrained_beside(cells: Sequence[SheetCell], previews: Sequence[SheetCell]) -> list[SheetCell]:
    """Previews of the untrained model, for prompts that were compared without it.

    Earlier versions did so.
    """
    prompts = {cell.prompt_key for cell in cells}
    have = {cell.prompt_key for cell in cells if cell.step == 0}
    missing = prompts - have
    return [cell for cell in previews if cell.step == 0 and cell.prompt_key in missing]


def notes_of(cells: Sequence[SheetCell], saved: SavedWeights) -> dict[int, str]:
    """What is to be said of the weights of a step."""
    notes = {}
    for step in {cell.step for cell in cells}:
        if step == saved.result:
            notes[step] = "result"
        elif step and step not in saved.checkpoints:
            notes[step] = "no checkpoint"
    return notes


def table(run: Run, request: Request) -> dict[str, Any]:
    """Template values for the table of checkpoints."""
    saved = SavedWeights.of(run.folder)
    sheet, shown = sheet_of(run, saved)

    def source(record: SheetCell) -> str:
        return address(run, record.path)

    comparison = build_table(sheet, source, shown)
    is_compared = any(cell.path.startswith(f"{SWEEP_FOLDER}/") for cell in sheet.cells)
    return {
        "table": comparison if comparison.has_trained else None,
        "is_compared": is_compared,
        "verdict": sheet.verdict if saved.steps else "",
        "saved": saved,
        "progress": comparison_under_way(run, request, comparison),
        "form": compare_form(run, saved),
        "missing": [step for step in saved.steps if is_compared and step not in sheet.steps],
        "earlier_sheet": "" if is_compared else earlier_sheet(run, project_of(request)),
        **stars_of(run, saved),
    }


def stars_of(run: Run, saved: SavedWeights) -> dict[str, Any]:
    """The stars of a run, or why they cannot be read."""
    problem = ""
    stars: list[Star] = []
    try:
        stars = read_stars(run.folder)
    except (UserError, OSError) as error:
        problem = str(error)
    return {
        "stars": {(star.step, star.strength, star.ema, star.prompt) for star in stars},
        "starred": by_weights(stars, saved.steps),
        "stars_problem": problem,
    }


def earlier_sheet(run: Run, project: Project) -> str:
    """The contact sheet of an earlier version, outside the output folder; empty without one."""
    path = Path(SAMPLES_FOLDER) / f"sweep-{run.folder.name}" / SHEET_PAGE
    return str(path) if (project.folder / path).is_file() else ""


# ---- Stars ----


def post_star(request: Request, body: dict[str, Any]) -> Response:
    """Give or take a star.

    The body is `{"run": ID, "step": 600, "strength": 0.75, "prompt": NAME, "starred": true}`.
    """
    run = runs_of(request).find(str(body.get("run", "")))
    stars = set_star(run.folder, star_in(body), starred=body.get("starred") is True)
    return JSONResponse({"stars": [asdict(star) for star in stars]})


def star_in(body: Mapping[str, Any]) -> Star:
    """The star that a request names.

    Raises:
        Refusal: 400 if it is not one.
    """
    step = body.get("step")
    strength = body.get("strength")
    prompt = body.get("prompt")
    # Not isinstance, since true is an int too.
    if type(step) is not int or not 0 < step < 2**63:
        raise Refusal(400, "A star needs the step of a checkpoint.")
    if not is_number(strength):
        raise Refusal(400, "A star needs a strength, such as 0.75.")
    if not isinstance(prompt, str) or len(prompt) > LONGEST_NAME:
        raise Refusal(400, "A star needs the name of a prompt.")
    return Star(step, float(strength or 0), prompt, body.get("ema") is True)


TABLE_VIEWS = {"results": show_results}
