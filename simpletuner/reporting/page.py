"""The report as one HTML document."""

from __future__ import annotations

from datetime import datetime

from simpletuner.reporting.gallery import comparison_section, previews_section, samples_section
from simpletuner.reporting.html import Html, document, element
from simpletuner.reporting.pieces import (
    charts_section,
    environment_section,
    has_accelerator,
    header,
    ledger_section,
    result_section,
    settings_section,
)
from simpletuner.reporting.previews import build_grid
from simpletuner.reporting.report import ReportData

# The page may show what it contains and video files next to it, and load nothing else.
POLICY = (
    "default-src 'none'; img-src data:; media-src data: 'self' file:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
# Seconds after which the page of a running session reloads; a finished report does not.
REFRESH = 30


def render_page(data: ReportData) -> str:
    """The whole document."""
    grid = build_grid(data.previews, data.output_dir)
    sections = (
        header(data),
        result_section(data.result),
        comparison_section(grid),
        charts_section(data.metrics, with_mfu=has_accelerator(data)),
        previews_section(grid),
        samples_section(data.samples, sum(row.used for row in data.ledger)),
        settings_section(data.settings),
        ledger_section(data.ledger),
        environment_section(data.environment),
    )
    refresh = REFRESH if data.state == "running" else None
    main = element("main", sections, _footer(refresh))
    viewer = element("dialog", id="viewer", aria_label="Preview")
    title = f"{data.title} · {data.state}, step {data.step}"
    return document(title, (main, viewer), policy=POLICY, scripts=("curves.js", "page.js"), refresh=refresh)


def _footer(refresh: int | None) -> Html:
    now = datetime.now().astimezone()
    written = element("time", now.strftime("%Y-%m-%d %H:%M:%S %Z"), datetime=now.isoformat(timespec="seconds"))
    news = f" It reloads every {refresh} seconds while the run goes on." if refresh else ""
    text = ("Written by simpletuner on ", written, f". This file needs no network and no other file.{news}")
    return element("footer", text, data_refresh=refresh)
