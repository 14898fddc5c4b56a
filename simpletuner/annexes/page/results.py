"""What a run has measured and rendered, on the page: curves and previews."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from simpletuner.annexes.page.live import chosen, drawing, runs_of
from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.report import html
from simpletuner.annexes.report.html import PreviewGrid, build_grid, pages_of, steps_of
from simpletuner.annexes.runs.run import Run
from simpletuner.errors import UserError
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    MediaRecord,
    describe_damage,
    read_media,
)


def address(run: Run, path: str) -> str:
    """The URL of a preview, which changes when the file does; empty if the file is missing."""
    file = run.folder / path
    if not file.is_file():
        return ""
    return f"/media/{run.id}/{quote(path)}?{file.stat().st_mtime_ns}"


def draw(run: Run, part: str, title: str, values: Callable[[], dict[str, Any]]) -> str:
    """A part of a run's view as HTML.

    Args:
        values: computes the template values; an error becomes a notice in place of the part.
    """
    return draw_part(
        title, lambda: html.render("page/results.html.jinja", part=part, run=run, **values())
    )


def show_curves(request: Request) -> Response:
    """The curves of a run, overlaid with those of other runs: `?beside=ID&beside=ID`."""
    run = chosen(request)
    names = filter(None, request.query_params.getlist("beside"))
    compared = [runs_of(request).find(name) for name in names]

    def values() -> dict[str, Any]:
        beside = {other.name: other.metrics for other in compared}
        return html.curves(run.metrics, beside=beside)

    with drawing:
        return HTMLResponse(draw(run, "curves", "Curves", values))


def grid_of(run: Run, records: Sequence[MediaRecord], below: str = ".") -> PreviewGrid:
    """A grid of pictures loaded by URL.

    Args:
        below: the folder in the run's folder to which the paths of the records are relative.
    """

    def source(record: MediaRecord) -> str:
        return address(run, f"{below}/{record.path}".removeprefix("./"))

    return build_grid(records, run.folder, source)


def show_previews(request: Request) -> Response:
    """Previews of a run: a selection or a page of all (`?page=3`), and unfinished ones."""
    run = chosen(request)
    page = request.query_params.get("page", "")
    return HTMLResponse(draw(run, "previews", "Previews", lambda: previews(run, page)))


def previews(run: Run, page: str) -> dict[str, Any]:
    """Template values for the previews of a run."""
    records = read_media(run.folder / MEDIA_FILE)
    pages = {str(number): content for number, content in enumerate(pages_of(records))}
    shown = records
    if page in pages:
        _title, shown = pages[page]
    return {
        "grid": grid_of(run, shown),
        "pages": pages,
        "page": page,
        "growing": unfinished(run),
        "steps": steps_of([records]),
        "damage": describe_damage(run.folder / MEDIA_FILE),
    }


def unfinished(run: Run) -> list[dict[str, Any]]:
    """The previews that a run is sampling at present."""
    with suppress(OSError, UserError):  # a damaged lock, which the status reports
        verdict = run.judge()
        if verdict.status == "running":
            previews = verdict.history.growing.values()
            return [{**preview, "source": address(run, preview["path"])} for preview in previews]
    return []


def show_pair(request: Request) -> Response:
    """The previews of two steps: `?before=0&after=300`."""
    run = chosen(request)
    steps = {request.query_params.get(key) for key in ("before", "after")}

    def values() -> dict[str, Any]:
        records = read_media(run.folder / MEDIA_FILE)
        return {"grid": grid_of(run, [record for record in records if str(record.step) in steps])}

    return HTMLResponse(draw(run, "pair", "Before and after", values))


VIEWS = {
    "curves": show_curves,
    "previews": show_previews,
    "pair": show_pair,
}
