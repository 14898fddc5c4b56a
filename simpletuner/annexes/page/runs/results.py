"""What a run has measured and rendered, on the page: curves and previews."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.runs.live import chosen, drawing, runs_of
from simpletuner.annexes.page.runs.previews import show_previews
from simpletuner.annexes.report import html


def show_curves(request: Request) -> Response:
    """The curves of a run, overlaid with those of other runs: `?beside=ID&beside=ID`."""
    run = chosen(request)
    names = filter(None, request.query_params.getlist("beside"))
    compared = [runs_of(request).find(name) for name in names]

    def draw() -> str:
        beside = {other.name: other.metrics for other in compared}
        values: dict[str, Any] = html.curves(run.metrics, beside=beside)
        return html.render("page/runs/results.html.jinja", **values)

    with drawing:
        return HTMLResponse(draw_part("Curves", draw))


VIEWS = {
    "curves": show_curves,
    "previews": show_previews,
}
