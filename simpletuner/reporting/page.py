"""What the report shows, derived from its data; `report.html.jinja` lays it out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from simpletuner.reporting.curves import charts_of, hours_of, points_of
from simpletuner.reporting.html import render
from simpletuner.reporting.metrics import MediaRecord
from simpletuner.reporting.pace import clock, pace_text, shares, shares_text
from simpletuner.reporting.previews import PreviewGrid, build_grid
from simpletuner.reporting.report import LedgerRow, ReportData

# Seconds after which the page of a running session reloads; a finished report does not.
REFRESH = 30
# More rows would make the page slow; the plan (`--dry-run`) lists them all.
LEDGER_ROWS = 500
OPEN_UP_TO = 24  # files; a longer list starts folded


def render_page(data: ReportData) -> str:
    """The whole document."""
    return render(
        "report.html.jinja",
        data=data,
        share=min(1.0, data.step / data.total_steps) if data.total_steps else 1.0,
        facts=list(facts(data)),
        **gallery(data.metrics, data.previews, data.output_dir, with_mfu=has_accelerator(data)),
        datasets=by_dataset(data.ledger),
        ledger_rows=LEDGER_ROWS,
        open_up_to=OPEN_UP_TO,
        refresh=REFRESH if data.state == "running" else None,
    )


def gallery(
    metrics: Sequence[Mapping[str, Any]], previews: Sequence[MediaRecord], folder: Path, *, with_mfu: bool
) -> dict[str, Any]:
    """What templates need for the curves of some metrics and a grid of previews, whose paths are below `folder`."""
    grid, charts = build_grid(previews, folder), charts_of(metrics, with_mfu=with_mfu)
    return {
        "grid": grid,
        "left_out": left_out(grid),
        "charts": charts,
        "chart_data": {"charts": [chart.to_json() for chart in charts], "hours": hours_of(metrics)},
        "scripts": ("curves.js", "viewer.js", "page.js"),
    }


def facts(data: ReportData) -> Iterator[tuple[str, str]]:
    """The key figures of a run, as (name, text)."""
    yield "Step", f"{data.step:,} of {data.total_steps:,}"
    losses = [value for _, value in points_of(data.metrics, "train_loss")]
    if losses:
        tenth = max(1, len(losses) // 10)
        first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
        yield "Loss, first to last tenth", f"{first:.3g} → {last:.3g}"
    seconds = [value for _, value in points_of(data.metrics, "seconds")]
    if seconds:
        yield "Pace", pace_text(sum(seconds) / len(seconds))
        yield "Time in steps", clock(sum(seconds))
        yield "Time spent on", shares_text(_shares(data.metrics))
    if memory := points_of(data.metrics, "peak_memory_gb"):
        yield "Peak memory", f"{max(value for _, value in memory):.1f} GB"
    utilisation = [value for _, value in points_of(data.metrics, "mfu")]
    if utilisation and has_accelerator(data):
        yield "Median MFU", f"{median(utilisation) * 100:.0f} % of the measured matmul rate"
    if data.ledger:
        yield "Files used", f"{sum(row.used for row in data.ledger):,} of {len(data.ledger):,}"
    if device := data.environment.get("device"):
        yield "Device", device.partition(",")[0]


def has_accelerator(data: ReportData) -> bool:
    """Whether the run is on a GPU; on a CPU the share of the matmul rate says little."""
    return data.environment.get("device", "unknown") not in ("cpu", "unknown")


def _shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How all steps of the record together spent their time."""
    seconds, waited, streamed = (points_of(rows, key) for key in ("seconds", "data_seconds", "weights_seconds"))
    sums = [sum(value for _, value in points) for points in (seconds, waited, streamed)]
    return shares(sums[0], sums[1], sums[2] if streamed else None)


def left_out(grid: PreviewGrid) -> list[str]:
    """What the grid does not show, in words."""
    counts = {"steps": grid.hidden_steps, "prompts": grid.hidden_rows}
    return [f"{count:,} more {what}" for what, count in counts.items() if count]


def by_dataset(ledger: Sequence[LedgerRow]) -> dict[str, list[LedgerRow]]:
    """The files of each dataset."""
    names = dict.fromkeys(row.dataset for row in ledger)
    return {name: [row for row in ledger if row.dataset == name] for name in names}
