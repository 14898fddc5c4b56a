"""HTML pages from the Jinja templates in this package, or as `room/name` in another; all texts are escaped.

Free of torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from simpletuner.reporting.curves import charts_of, hours_of
from simpletuner.reporting.metrics import Columns, MediaRecord
from simpletuner.reporting.previews import PreviewGrid, build_grid

FOLDER = Path(__file__).parent
# A page may show what it contains and video files next to it, and load nothing else.
POLICY = (
    "default-src 'none'; img-src data:; media-src data: 'self' file:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def render(template: str, **values: object) -> str:
    """A page from a template that extends `page.html.jinja`.

    Args:
        values: what the template shows, and `scripts` and `refresh` of the page.
    """
    return _environment().get_template(template).render(values, policy=POLICY, now=datetime.now().astimezone())


def gallery(metrics: Columns, previews: Sequence[MediaRecord], folder: Path, *, with_mfu: bool) -> dict[str, Any]:
    """What templates need for the curves of some metrics and a grid of previews, whose paths are below `folder`."""
    grid, scripts = build_grid(previews, folder), ("curves.js", "viewer.js", "page.js")
    return {"grid": grid, "left_out": left_out(grid), "scripts": scripts, **curves(metrics, with_mfu=with_mfu)}


def curves(metrics: Columns, *, with_mfu: bool = True) -> dict[str, Any]:
    """What templates need for the curves of some metrics."""
    charts = charts_of(metrics, with_mfu=with_mfu)
    return {"charts": charts, "chart_data": {"charts": [each.to_json() for each in charts], "hours": hours_of(metrics)}}


def left_out(grid: PreviewGrid) -> list[str]:
    """What the grid does not show, in words."""
    counts = {"steps": grid.hidden_steps, "prompts": grid.hidden_rows}
    return [f"{count:,} more {what}" for what, count in counts.items() if count]


def breakable(text: str) -> Markup:
    """A path or name that may wrap after its separators only."""
    return Markup("<wbr>").join(re.findall(r"[^/\\_.:-]*[/\\_.:-]+|[^/\\_.:-]+", text))


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader([FOLDER, FOLDER.parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    environment.filters["grouped"] = "{:,}".format
    environment.globals["resource"] = lambda name: Markup((FOLDER / name).read_text(encoding="utf-8"))
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment
