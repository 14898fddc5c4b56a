"""The parts of a page about a run, each a function from data to HTML: facts, charts, settings, files, result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from simpletuner.reporting.curves import Chart, charts_of, hours_of, points_of
from simpletuner.reporting.html import Attribute, Child, Html, breakable, data_block, element, join
from simpletuner.reporting.pace import clock, pace_text, shares, shares_text
from simpletuner.reporting.report import LedgerRow, ReportData, Result, SettingRow

# More rows would make the page slow; the plan (`--dry-run`) lists them all.
LEDGER_ROWS = 500
OPEN_UP_TO = 24  # files; a longer list starts folded


def section(title: str, *children: Child, hint: Child = None, **attributes: Attribute) -> Html:
    """A part of the page with its heading."""
    return element("section", element("h2", title), hint and element("p.hint", hint), children, **attributes)


def definitions(kind: str, pairs: Iterable[tuple[str, str]]) -> Html:
    """Names with their values, in a grid."""
    return element(f"dl.{kind}", [element("div", element("dt", name), element("dd", value)) for name, value in pairs])


def header(data: ReportData) -> Html:
    """What is trained, the progress, and the key figures."""
    share = min(1.0, data.step / data.total_steps) if data.total_steps else 1.0
    done = element("span", style=f"width:{share * 100:.2f}%")
    return element(
        "header",
        element("p.kicker", "Training report"),
        element("div.heading", element("h1", data.title), element(f"span.state.{data.state}", data.state)),
        data.subtitle and element("p.subtitle", data.subtitle),
        element("div.progress", done, role="img", aria_label=f"{share:.0%} done"),
        definitions("facts", facts(data)),
        data.message and element("p.message", data.message),
        data.notes and element("ul.notes", [element("li", note) for note in data.notes]),
    )


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


def result_section(result: Result | None) -> Html | None:
    """The published file, its size, and a program that uses it."""
    if result is None:
        return None
    size = f"{result.size / 1e6:,.1f} MB" if result.size < 1e9 else f"{result.size / 1e9:,.1f} GB"
    where = element("span.dim", f" {size}, in the output folder")
    file = element("p.file", element("code", breakable(result.path)), where)
    if not result.snippet:
        return section("Result", file, hint="Put it into models/loras of ComfyUI.")
    code = element("div.snippet", element("button.copy", "Copy", type="button"), element("pre", result.snippet))
    hint = element("p.hint", "In the environment where simpletuner is installed; what the newest preview shows:")
    use = element("details", element("summary", "Use it in Python"), hint, code)
    return section(
        "Result", file, use, hint="It was loaded through the stock pipeline and compared with what was trained."
    )


def charts_section(rows: Sequence[Mapping[str, Any]], *, with_mfu: bool) -> Html | None:
    """Every chart of a record with the data that the script draws; minor charts are folded."""
    charts = charts_of(rows, with_mfu=with_mfu)
    if not charts:
        return None
    minor = [chart for chart in charts if chart.minor]
    major = [chart for chart in charts if not chart.minor]
    more = element("details", element("summary", "More curves"), element("div.charts", map(figure, minor)))
    axis = [element("button", name, type="button", data_axis=name.lower()) for name in ("Steps", "Hours")]
    return section(
        "Curves",
        element("div.axis", axis, role="group", aria_label="Horizontal axis"),
        element("div.charts", [figure(chart, wide=index == 0) for index, chart in enumerate(major)]),
        more if minor else None,
        element("noscript", element("p.hint", "The curves need JavaScript.")),
        data_block("charts", {"charts": [chart.to_json() for chart in charts], "hours": hours_of(rows)}),
        id="curves",
    )


def figure(chart: Chart, *, wide: bool = False) -> Html:
    """The frame of one chart; the script draws into it."""
    caption = (
        element("b", chart.title),
        chart.note and element("span.note", chart.note),
        chart.log and element("button.log", "log", type="button", aria_pressed="false"),
    )
    name = "figure.chart.wide" if wide else "figure.chart"
    return element(name, element("figcaption", caption), element("div.plot"), data_chart=chart.title)


def settings_section(settings: Sequence[SettingRow]) -> Html | None:
    """Options that differ from their defaults and what set them; the rest is folded."""
    if not settings:
        return None
    changed = [setting for setting in settings if setting.changed]
    rest = [setting for setting in settings if not setting.changed]
    shown = settings_table(changed) if changed else element("p.hint", "Every option has its default.")
    summary = element("summary", f"{len(rest):,} options at their defaults")
    return section("Configuration", shown, element("details", summary, settings_table(rest)))


def settings_table(settings: Sequence[SettingRow]) -> Html:
    """Options by section: value, default, and what decided it."""
    rows, group = [], ""
    for setting in settings:
        if setting.section != group:
            group = setting.section
            rows.append(element("tr.group", element("th", group, colspan=4, scope="rowgroup")))
        default = setting.default if setting.changed else ""
        value = element("td.value", breakable(setting.value))
        origin = element("td.dim", "/".join(Path(setting.origin).parts[-2:]), title=setting.origin)
        rows.append(element("tr", element("td.key", setting.key), value, element("td.default.dim", default), origin))
    return table(("Option", "Value", "Default", "Set by"), rows)


def table(heads: Sequence[str], rows: Iterable[Html]) -> Html:
    """A table with column headings."""
    head = element("thead", element("tr", [element("th", head, scope="col") for head in heads]))
    return element("table.rows", head, element("tbody", rows))


def ledger_section(ledger: Sequence[LedgerRow]) -> Html | None:
    """Counts of each dataset, then its files; unused files come first, since readers look for those."""
    if not ledger:
        return None
    ordered = sorted(ledger, key=lambda row: row.used)
    rest = len(ordered) - LEDGER_ROWS
    more = join(f"And {rest:,} more files; ", element("code", "simpletuner plan"), " lists them all.")
    return section(
        "Dataset",
        [_dataset_summary(name, ledger) for name in dict.fromkeys(row.dataset for row in ledger)],
        element(
            "details",
            element("summary", f"{len(ordered):,} files"),
            table(("File", "Size", "Trained at", "Cut off", "State"), map(_ledger_row, ordered[:LEDGER_ROWS])),
            rest > 0 and element("p.hint", more),
            open=len(ordered) <= OPEN_UP_TO,
        ),
    )


def _dataset_summary(name: str, ledger: Sequence[LedgerRow]) -> Html:
    rows = [row for row in ledger if row.dataset == name]
    used = sum(row.used for row in rows)
    buckets = sorted({row.bucket for row in rows if row.used and row.bucket})
    sizes = f", trained at {', '.join(buckets[:6])}{' …' if len(buckets) > 6 else ''}" if buckets else ""
    unused = element("span.badge.bad", f"{len(rows) - used:,} not used") if used < len(rows) else None
    return element("p.dataset", element("b", name), f" {used:,} of {len(rows):,} files used{sizes} ", unused)


def _ledger_row(row: LedgerRow) -> Html:
    state = "used" if row.used else "not used"
    return element(
        "tr",
        element("td.key.file-name", breakable(row.file), element("span.dim", f" {row.dataset}")),
        [element("td", text) for text in (row.size, row.bucket, row.crop)],
        element(f"td.{'good' if row.used else 'bad'}", f"{state}: {row.reason}" if row.reason else state),
    )


def environment_section(environment: Mapping[str, str]) -> Html | None:
    """Versions and device."""
    return section("Environment", definitions("environment", environment.items())) if environment else None
