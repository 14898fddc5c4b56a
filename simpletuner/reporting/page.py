"""The HTML of the report. Every text that comes from outside passes through `escape`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from statistics import median
from typing import Any

from simpletuner.reporting.curves import Chart, charts_of, points_of
from simpletuner.reporting.pace import clock, pace_text, shares, shares_text
from simpletuner.reporting.previews import Cell, Grid, Row, build_grid
from simpletuner.reporting.report import ReportData, Setting, ledger_section

# The page may show what is inside it (and videos beside it) and must not ask anybody for anything else.
POLICY = (
    "default-src 'none'; img-src data:; media-src data: 'self' file:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def render_page(data: ReportData) -> str:
    """The whole document."""
    resources = files("simpletuner.reporting")
    grid = build_grid(data.previews, data.output_dir)
    charts = charts_of(data.metrics)
    sections = [
        _header(data),
        _comparison_section(grid),
        _charts_section([chart for chart in charts if not chart.minor], "Curves"),
        _minor_charts([chart for chart in charts if chart.minor]),
        _previews_section(grid),
        _settings_section(data.settings),
        ledger_section(data.ledger),
        _environment_section(data),
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(data.title)} · {data.state}, step {data.step}</title>
<style>
{resources.joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{"".join(section for section in sections if section)}
<footer>Written by simpletuner on {escape(_now())}. This file is complete in itself and opens offline.</footer>
</main>
<dialog id="viewer" aria-label="Preview"></dialog>
<script type="application/json" id="charts">{_json([chart.to_json() for chart in charts])}</script>
<script>
{resources.joinpath("page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def _header(data: ReportData) -> str:
    share = min(1.0, data.step / data.total_steps) if data.total_steps else 1.0
    facts = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in _facts(data))
    notes = "".join(f"<li>{escape(note)}</li>" for note in data.notes)
    return f"""<header>
<p class="kicker">Training report</p>
<div class="heading"><h1>{escape(data.title)}</h1><span class="state {data.state}">{data.state}</span></div>
{f'<p class="subtitle">{escape(data.subtitle)}</p>' if data.subtitle else ""}
<div class="progress" role="img" aria-label="{share:.0%} done"><span style="width:{share * 100:.2f}%"></span></div>
<dl class="facts">{facts}</dl>
{f'<p class="message">{escape(data.message)}</p>' if data.message else ""}
{f'<ul class="notes">{notes}</ul>' if notes else ""}
</header>
"""


def _facts(data: ReportData) -> Iterable[tuple[str, str]]:
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
        yield "It went into", shares_text(_shares(data.metrics))
    utilisation = [value for _, value in points_of(data.metrics, "mfu")]
    if utilisation:
        yield "Median MFU", f"{median(utilisation) * 100:.0f} % of the measured matmul rate"
    if data.ledger:
        yield "Files used", f"{sum(row.used for row in data.ledger):,} of {len(data.ledger):,}"
    if device := data.environment.get("device"):
        yield "Device", device.partition(",")[0]


def _shares(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What all steps of the record together spent their time on."""
    seconds, waited, streamed = (points_of(rows, key) for key in ("seconds", "data_seconds", "weights_seconds"))
    sums = [sum(value for _, value in points) for points in (seconds, waited, streamed)]
    return shares(sums[0], sums[1], sums[2] if streamed else None)


def _comparison_section(grid: Grid) -> str:
    """Filled by `page.js` from the pictures of the grid, so that no picture is in the file twice."""
    if not any(_first_and_last(row) for row in grid.rows):
        return ""
    return """<section id="comparison" hidden>
<h2>Before and after</h2>
<p class="hint">Drag across a picture.</p>
<div class="comparisons"></div>
</section>
"""


def _first_and_last(row: Row) -> bool:
    return sum(cell is not None and bool(cell.source) and not cell.is_video for cell in row.cells) > 1


def _charts_section(charts: Sequence[Chart], title: str) -> str:
    if not charts:
        return ""
    figures = "".join(_figure(chart, index) for index, chart in enumerate(charts))
    return f"""<section>
<h2>{title}</h2>
<div class="charts">{figures}</div>
<noscript><p class="hint">The curves need JavaScript.</p></noscript>
</section>
"""


def _minor_charts(charts: Sequence[Chart]) -> str:
    if not charts:
        return ""
    figures = "".join(_figure(chart, index) for index, chart in enumerate(charts))
    return f"""<section class="more">
<details><summary>More curves</summary><div class="charts">{figures}</div></details>
</section>
"""


def _figure(chart: Chart, index: int) -> str:
    button = '<button type="button" class="log" aria-pressed="false">log</button>' if chart.log else ""
    note = f'<span class="note">{escape(chart.note)}</span>' if chart.note else ""
    wide = " wide" if index == 0 and not chart.minor else ""
    return (
        f'<figure class="chart{wide}" data-chart="{escape(chart.title)}">'
        f"<figcaption><b>{escape(chart.title)}</b>{note}{button}</figcaption><div class='plot'></div></figure>"
    )


def _previews_section(grid: Grid) -> str:
    if not grid.rows:
        return ""
    head = "".join(f"<th scope='col'>{'step 0' if step == 0 else f'{step:,}'}</th>" for step in grid.steps)
    body = "".join(_preview_row(row, index) for index, row in enumerate(grid.rows))
    left_out = [
        f"{count:,} more {what}"
        for count, what in ((grid.hidden_steps, "steps"), (grid.hidden_rows, "prompts"))
        if count
    ]
    note = f" Not shown here: {' and '.join(left_out)}; all files are in the output folder." if left_out else ""
    return f"""<section>
<h2>Previews</h2>
<p class="hint">A row for each prompt, a column for each step. Click a picture to enlarge it.{note}</p>
<div class="scroll"><table class="previews" style="--columns:{len(grid.steps)}">
<thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody>
</table></div>
</section>
"""


def _preview_row(row: Row, index: int) -> str:
    badge = ' <span class="badge">EMA</span>' if row.ema else ""
    cells = "".join(f"<td>{_preview(cell)}</td>" for cell in row.cells)
    return (
        f'<tr data-row="{index}"><th scope="row"><b>{escape(row.name)}</b>{badge}'
        f'<span class="prompt">{escape(row.prompt or "(empty prompt)")}</span></th>{cells}</tr>'
    )


def _preview(cell: Cell | None) -> str:
    if cell is None:
        return '<span class="absent">–</span>'
    if not cell.source:
        return '<span class="absent">file gone</span>'
    record = cell.record
    alt = escape(f"{record.short_name}, step {record.step}")
    if cell.is_video:
        return f'<video controls muted loop preload="metadata" src="{escape(cell.source)}" title="{alt}"></video>'
    return (
        f'<button type="button" class="preview" data-step="{record.step}">'
        f'<img loading="lazy" src="{escape(cell.source)}" alt="{alt}" width="{record.width}" height="{record.height}">'
        "</button>"
    )


def _settings_section(settings: Sequence[Setting]) -> str:
    if not settings:
        return ""
    changed = [setting for setting in settings if setting.changed]
    rest = [setting for setting in settings if not setting.changed]
    return f"""<section>
<h2>Configuration</h2>
{_settings_table(changed) if changed else '<p class="hint">Every option has its default.</p>'}
<details><summary>{len(rest):,} options at their defaults</summary>{_settings_table(rest)}</details>
</section>
"""


def _settings_table(settings: Sequence[Setting]) -> str:
    rows, section = [], ""
    for setting in settings:
        if setting.section != section:
            section = setting.section
            rows.append(f'<tr class="group"><th colspan="4" scope="rowgroup">{escape(section)}</th></tr>')
        default = escape(setting.default) if setting.changed else ""
        rows.append(
            f'<tr><td class="key">{escape(setting.key)}</td><td class="value">{escape(setting.value)}</td>'
            f'<td class="dim">{default}</td><td class="dim">{escape(setting.origin)}</td></tr>'
        )
    head = "<tr><th>Option</th><th>Value</th><th>Default</th><th>Set by</th></tr>"
    return f'<div class="scroll"><table class="rows"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _environment_section(data: ReportData) -> str:
    if not data.environment:
        return ""
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in data.environment.items()
    )
    return f'<section><h2>Environment</h2><dl class="environment">{items}</dl></section>\n'


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _now() -> str:
    return datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
