"""HTML pages from Jinja templates: curves, grids of previews, thumbnails; all texts are escaped.

A template is one of this folder, or of another annex as `annex/name`.
"""

from __future__ import annotations

import base64
import functools
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from html import unescape
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from PIL import Image

from simpletuner.annexes.figures import BARS, Columns, Point, RunningMean, evaluation_names
from simpletuner.annexes.languages.say import say, say_counted, spoken
from simpletuner.config.schema import NOISE_LEVELS
from simpletuner.reporting.metrics import EVALUATED, MIME, VIDEO_MIME, MediaRecord
from simpletuner.reporting.step_figures import FIGURES
from simpletuner.reporting.wording import clock_text

FOLDER = Path(__file__).parent
# The sampling program in a report, as report.html.jinja writes it, is within its first bytes.
PROGRAM = re.compile(r'class="snippet">.*?<pre>(.*?)</pre>', re.DOTALL)
HEAD_BYTES = 1 << 18
# A page may load only embedded data, and video files beside it.
POLICY = (
    "default-src 'none'; img-src data:; media-src data: 'self' file:; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)


def render(template: str, **values: object) -> str:
    """Render a template that extends `page.html.jinja`.

    Args:
        values: values for the template, including `scripts` and `refresh` of the page.
    """
    page = _environment().get_template(template)
    now = datetime.now().astimezone()
    return encodable(page.render(values, policy=POLICY, now=now, language=spoken()))


def encodable(text: str) -> str:
    """A text with `?` for what UTF-8 cannot encode: bytes of file names that are not UTF-8."""
    return text.encode(errors="replace").decode()


def gallery(
    metrics: Columns, previews: Sequence[MediaRecord], folder: Path, *, with_mfu: bool
) -> dict[str, Any]:
    """Template values for the curves of metrics and a grid of previews.

    Args:
        folder: the folder to which the paths of previews are relative.
    """
    grid = build_grid(previews, folder)
    left_out = []
    if grid.hidden_steps:
        left_out.append(f"{grid.hidden_steps:,} more steps")
    if grid.hidden_rows:
        left_out.append(f"{grid.hidden_rows:,} more prompts")
    return {
        "grid": grid,
        "left_out": left_out,
        "scripts": ("curves.js", "viewer.js", "page.js"),
        **curves(metrics, with_mfu=with_mfu),
    }


def curves(
    metrics: Columns, *, with_mfu: bool = True, beside: Mapping[str, Columns] | None = None
) -> dict[str, Any]:
    """Template values for the curves of metrics.

    Args:
        beside: metrics of other runs by name, whose curves are drawn over those of the run.
    """
    charts = charts_of(metrics, with_mfu=with_mfu)
    for name, columns in (beside or {}).items():
        compared = charts_of(columns)
        charts = [with_lines_of(chart, name, compared) for chart in charts]
    # Runs differ in pace, so they are compared over steps only.
    hours = [] if beside else hours_of(metrics)
    chart_data = {"charts": [chart.to_json() for chart in charts], "hours": hours}
    return {"charts": charts, "chart_data": chart_data}


def with_lines_of(chart: Chart, name: str, compared: Sequence[Chart]) -> Chart:
    """A chart with the lines of another run's chart of the same title; not of histograms.

    Args:
        name: name of the other run.
        compared: charts of the other run.
    """
    if chart.bars:
        return chart
    series = [*chart.series]
    for compared_chart in compared:
        if compared_chart.title == chart.title:
            series += [replace(line, name=f"{name}: {line.name}") for line in compared_chart.series]
    return replace(chart, series=series)


def program_in(report: Path) -> str:
    """The sampling program in a report; empty if there is none."""
    if not report.is_file():
        return ""
    with report.open("rb") as file:
        # The program is near the top; the pictures below it take megabytes.
        match = PROGRAM.search(file.read(HEAD_BYTES).decode(errors="replace"))
    return unescape(match[1]) if match else ""


def breakable(text: str) -> Markup:
    """A path or name with line breaks allowed only after separators."""
    return Markup("<wbr>").join(re.findall(r"[^/\\_.:-]*[/\\_.:-]+|[^/\\_.:-]+", text))


@functools.cache
def _environment() -> Environment:
    loader = FileSystemLoader([FOLDER, FOLDER.parent])
    environment = Environment(
        loader=loader,
        autoescape=True,
        # A misspelt name in a template raises an error; by default it would render as empty.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    environment.filters["grouped"] = "{:,}".format
    environment.filters["with_code"] = with_code
    environment.filters["clock"] = clock_text
    environment.globals["say"] = say
    environment.globals["say_counted"] = say_counted
    environment.globals["resource"] = lambda name: Markup(loader.get_source(environment, name)[0])
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment


def with_code(text: str) -> Markup:
    """A message as HTML: what is in backticks becomes code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


Item = TypeVar("Item")

HELD_OUT_SUFFIX = "-held-out"  # of the id of a dataset that `hold_out` splits off
POINTS = 1000  # more than a chart has pixels
# A curve is smoothed over this share of its length, within these bounds in steps.
SMOOTHING_SHARE = 0.05
SHORTEST_SPAN = 5
LONGEST_SPAN = 200
# A curve whose total variation is this many times its range is noisy; a schedule goes up and down
# once or twice.
NOISY_TRAVEL = 4
WAITS = {"data_seconds": "for data", "weights_seconds": "for weights"}
NOT_MEASURED = {"step", "time", "epoch"}


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        raw: measured values, thinned out.
        smooth: running average; empty if the raw line is smooth already.
    """

    name: str
    raw: Sequence[Point]
    smooth: Sequence[Point] = ()


@dataclass(frozen=True)
class Chart:
    """A figure of the report.

    Attributes:
        note: a short explanation.
        log: offer a logarithmic axis.
        minor: show only on request.
        bars: a histogram instead of curves; x is not a step.
    """

    title: str
    series: Sequence[Series]
    note: str = ""
    log: bool = False
    minor: bool = False
    bars: bool = False

    def to_json(self) -> dict[str, Any]:
        """The chart as data for `curves.js`."""
        lines = [
            {"name": line.name, "raw": _compact(line.raw), "smooth": _compact(line.smooth)}
            for line in self.series
        ]
        return {"title": self.title, "bars": self.bars, "series": lines}


def charts_of(metrics: Columns, *, with_mfu: bool = True) -> list[Chart]:
    """Charts of all recorded metrics, most important first.

    Args:
        with_mfu: include model FLOP utilisation, which means little on a CPU.
    """
    charts = [*_loss_chart(metrics)]
    points = metrics.points("learning_rate")
    if points:
        charts.append(Chart("Learning rate", [Series("learning rate", thin(points))]))
    charts += _figure_charts(metrics)
    charts += _timestep_chart(metrics)
    charts += _waiting_chart(metrics)
    if with_mfu:
        charts += _mfu_chart(metrics)
    charts += _minor_charts(metrics)
    return charts


def _figure_charts(metrics: Columns) -> Iterator[Chart]:
    """Charts of the figures of a step that have one."""
    for figure in FIGURES:
        curve = figure.curve
        if curve is None:
            continue
        points = metrics.points(figure.name)
        if points:
            line = smoothed(curve.title.lower(), points)
            yield Chart(curve.title, [line], curve.note, log=curve.log)


def _mfu_chart(metrics: Columns) -> Iterator[Chart]:
    points = metrics.points("mfu")
    if points:
        note = (
            "model FLOP utilisation: the model's arithmetic as a share of the measured matmul rate"
        )
        yield Chart("MFU", [smoothed("mfu", points)], note, minor=True)


def _minor_charts(metrics: Columns) -> Iterator[Chart]:
    """Charts, shown on request, of all other columns."""
    # Charts of their own, or none: see `Figure`.
    drawn = {figure.name for figure in FIGURES if figure.curve or not figure.has_curve}
    for key in metrics.names:
        if key in drawn or key in NOT_MEASURED or key.startswith(EVALUATED):
            continue
        points = metrics.points(key)
        if len(points) > 1:
            is_positive = all(value > 0 for _, value in points)
            yield Chart(key, [smoothed(key, points)], log=is_positive, minor=True)


def hours_of(metrics: Columns) -> list[Point]:
    """(step, hours spent in steps so far), for charts over time; excludes time between sessions."""
    points = metrics.points("seconds")
    spent = accumulate(seconds / 3600 for _, seconds in points)
    return thin([(step, hours) for (step, _), hours in zip(points, spent, strict=True)])


def smoothed(name: str, points: Sequence[Point]) -> Series:
    """A thinned line; a noisy one with a running average over a twentieth of its length."""
    if not is_noisy(points):
        return Series(name, thin(points))
    # An exponential average over n values has a memory of 1 - 1/n.
    mean = RunningMean(1 - 1 / smoothing_span(len(points)))
    averages = [(step, mean.add(value)) for step, value in points]
    return Series(name, thin_extremes(points), thin(averages))


def is_noisy(points: Sequence[Point]) -> bool:
    """Whether a curve needs a running average, which would only delay a smooth one."""
    if len(points) <= SHORTEST_SPAN:
        return False
    values = [value for _, value in points]
    travel = sum(abs(after - before) for before, after in pairwise(values))
    return travel > NOISY_TRAVEL * (max(values) - min(values))


def smoothing_span(count: int) -> int:
    """Number of steps over which a curve of `count` points is averaged."""
    return round(min(max(count * SMOOTHING_SHARE, SHORTEST_SPAN), LONGEST_SPAN))


def thin(items: Sequence[Item], limit: int = POINTS) -> list[Item]:
    """At most `limit` evenly spaced items, including the first and the last."""
    if len(items) <= limit:
        return list(items)
    last = len(items) - 1
    return [items[round(index * last / (limit - 1))] for index in range(limit)]


def thin_extremes(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """At most `limit` points: the minimum and maximum of every interval, so that spikes stay."""
    if len(points) <= limit:
        return list(points)
    intervals = limit // 2
    edges = [index * len(points) // intervals for index in range(intervals + 1)]
    kept: list[Point] = []
    for start, end in pairwise(edges):
        interval = points[start:end]
        lowest = min(interval, key=itemgetter(1))
        highest = max(interval, key=itemgetter(1))
        kept += sorted({lowest, highest})  # by step; the set merges equal points
    return kept


def _loss_chart(metrics: Columns) -> Iterator[Chart]:
    """The training loss with the evaluation losses."""
    points = metrics.points("train_loss")
    if not points:
        return
    loss = smoothed("loss", points)
    note = ""
    if loss.smooth:
        span = smoothing_span(len(points))
        note = f"faint: each step; line: smoothed over about {span} steps"
    evaluations = [
        Series(evaluation_title(key), thin(metrics.points(key)))
        for key in evaluation_names(metrics)
    ]
    yield Chart("Loss", [loss, *evaluations], note, log=True)


def evaluation_title(key: str) -> str:
    """`held-out loss (cats)`, with the dataset whose files were held out or set apart."""
    dataset = key.removeprefix(EVALUATED).replace(HELD_OUT_SUFFIX, "").replace("/", ", ")
    return f"held-out loss ({dataset})"


def _waiting_chart(metrics: Columns) -> Iterator[Chart]:
    """The seconds that steps wait for data and for streamed weights."""
    series = []
    for key, name in WAITS.items():
        points = metrics.points(key)
        if points:
            series.append(smoothed(name, points))
    if series:
        yield Chart("Seconds of waiting", series, "part of each step", log=True, minor=True)


def _timestep_chart(metrics: Columns) -> Iterator[Chart]:
    """A histogram of the trained noise levels."""
    if metrics.timesteps:
        width = NOISE_LEVELS // BARS
        # The middle of a range: 25, 75, … 975.
        bars = [(bar * width + width // 2, float(metrics.timesteps[bar])) for bar in range(BARS)]
        yield Chart(
            "Timesteps",
            [Series("samples", bars)],
            "samples by noise level; 1000 is pure noise",
            bars=True,
        )


def _compact(points: Sequence[Point]) -> list[list[float]]:
    """Points with five digits, which are finer than a pixel of a chart."""
    return [[step, float(f"{value:.5g}")] for step, value in points]


# Short name of `validation_prompt`.
MAIN_PROMPT = "validation"
# Maximum numbers of prompts and of previews; the page reports how many it leaves out.
ROWS = 24
CELLS = 96
FEWEST_COLUMNS = 4
# Bytes of all previews in a page; base64 adds a third.
BUDGET = 6_000_000
SIDES = (1024, 768, 512, 384, 256, 128)
QUALITY = 82
THUMBNAIL_SIDE = 320


@dataclass(frozen=True)
class Cell:
    """A preview in the page.

    Attributes:
        source: a data URI; for a video too large to embed, a path relative to the page; empty if
            the file is missing.
    """

    record: MediaRecord
    source: str


@dataclass(frozen=True)
class Row:
    """Previews of a prompt by step; None at steps where it was not rendered.

    Attributes:
        plain: previews of the trained weights.
        averaged: previews of the EMA weights at the same steps; empty without EMA.
    """

    name: str
    prompt: str
    plain: Sequence[Cell | None]
    averaged: Sequence[Cell | None] = ()


@dataclass(frozen=True)
class PreviewGrid:
    """The previews that the page shows, and how many steps and rows it leaves out."""

    steps: Sequence[int]
    rows: Sequence[Row]
    hidden_steps: int = 0
    hidden_rows: int = 0

    @property
    def has_comparison(self) -> bool:
        """Whether any row has two previews to compare."""
        for row in self.rows:
            for line in (row.plain, row.averaged):
                shown = [cell for cell in line if cell is not None and cell.source]
                if len(shown) > 1:
                    return True
        return False


def build_grid(
    records: Sequence[MediaRecord],
    output_dir: Path,
    link: Callable[[MediaRecord], str] | None = None,
) -> PreviewGrid:
    """Select rows and columns, and embed their pictures.

    Args:
        records: all previews of the run.
        output_dir: the folder to which preview paths are relative.
        link: returns the URL of a preview, for served pages, which embed no pictures.
    """
    ordered = grid_rows(records)
    shown = ordered[:ROWS]
    all_steps = steps_of(shown)
    steps = thin(all_steps, columns_beside(shown))
    embedded = [record for record in chain.from_iterable(shown) if record.step in steps]
    source = link or embedding(output_dir, len(embedded))
    rows = [_build_row(row, steps, source) for row in shown]
    return PreviewGrid(steps, rows, len(all_steps) - len(steps), len(ordered) - len(shown))


def embedding(folder: Path, count: int) -> Callable[[MediaRecord], str]:
    """What returns the data URIs of previews in a page with this many of them.

    Args:
        folder: the folder to which the paths of previews are relative.
    """
    # Bytes per preview, for the next power of two of previews: a change re-encodes all of them, so
    # it happens only when their number doubles.
    allowance = BUDGET // (1 << max(0, count - 1).bit_length())
    return partial(_source, output_dir=folder, allowance=allowance)


def grid_rows(records: Iterable[MediaRecord]) -> list[list[MediaRecord]]:
    """Previews by prompt, index and size, in the order of a grid."""
    by_row: dict[tuple[str, int, int, int], list[MediaRecord]] = {}
    for record in records:
        by_row.setdefault(record.row, []).append(record)
    return sorted(by_row.values(), key=lambda row: grid_order(row[0]))


def steps_of(rows: Iterable[Iterable[MediaRecord]]) -> list[int]:
    """The steps at which any of the rows was rendered."""
    return sorted({record.step for record in chain.from_iterable(rows)})


def columns_beside(rows: Sequence[Sequence[MediaRecord]]) -> int:
    """How many steps a grid of these rows shows."""
    lines = 0
    for row in rows:
        # A prompt with EMA previews takes two lines of the grid.
        lines += len({record.ema for record in row})
    return max(FEWEST_COLUMNS, CELLS // max(1, lines))


def pages_of(records: Sequence[MediaRecord]) -> list[tuple[str, list[MediaRecord]]]:
    """Split previews into named pages, each small enough for a grid to show completely."""
    rows = grid_rows(records)
    pages: list[tuple[str, list[MediaRecord]]] = []
    for top in range(0, len(rows), ROWS):
        chunk = rows[top : top + ROWS]
        prompts = ""
        if len(rows) > ROWS:
            prompts = f", prompts {top + 1} to {top + len(chunk)}"
        steps = steps_of(chunk)
        width = columns_beside(chunk)
        for start in range(0, len(steps), width):
            part = steps[start : start + width]
            first = part[0]
            last = part[-1]
            kept = [record for record in chain.from_iterable(chunk) if first <= record.step <= last]
            pages.append((f"steps {first:,} to {last:,}{prompts}", kept))
    return pages


def grid_order(record: MediaRecord) -> tuple[bool, bool]:
    """A sort key: `validation_prompt` first, at any strength, and the empty prompt last."""
    name, *_ = record.short_name.split(" ")  # without the strength
    return not record.prompt, name != MAIN_PROMPT


def _build_row(
    records: Sequence[MediaRecord], steps: Sequence[int], source: Callable[[MediaRecord], str]
) -> Row:
    """The row of a prompt; `source` returns the picture of a record."""

    def cells(*, averaged: bool) -> list[Cell | None]:
        by_step = {record.step: record for record in records if record.ema == averaged}
        line: list[Cell | None] = []
        for step in steps:
            record = by_step.get(step)
            line.append(None if record is None else Cell(record, source(record)))
        return line

    has_averaged = any(record.ema for record in records)
    averaged = cells(averaged=True) if has_averaged else ()
    return Row(records[0].short_name, records[0].prompt, cells(averaged=False), averaged)


def thumbnail(picture: Image.Image, side: int = THUMBNAIL_SIDE) -> str:
    """A small copy of a training picture as a data URI."""
    return _data_uri("image/webp", webp(picture.convert("RGB"), side))


def _source(record: MediaRecord, output_dir: Path, allowance: int) -> str:
    """The embedded preview of a record; empty if the file is missing."""
    path = output_dir / record.path
    try:
        modified = path.stat().st_mtime_ns
    except OSError:
        return ""
    return _pack(path, record.path, modified, allowance)


@lru_cache(maxsize=4 * CELLS)
def _pack(path: Path, relative: str, modified: int, allowance: int) -> str:
    """A data URI of a file, or of its largest copy within the allowance; of a large video, its URL.

    `modified` is a cache key.
    """
    suffix = path.suffix.lower()
    mime = (MIME | VIDEO_MIME).get(suffix)
    if mime and path.stat().st_size <= allowance:
        return _data_uri(mime, path.read_bytes())
    if suffix in VIDEO_MIME:
        return quote(relative)
    try:
        with Image.open(path) as file:
            picture = file.convert("RGB")
    except (OSError, ValueError):
        return ""
    for side in SIDES:
        content = webp(picture, side)
        if len(content) <= allowance:
            break
    return _data_uri("image/webp", content)


def webp(picture: Image.Image, side: int) -> bytes:
    """Encode a picture as WebP, after reducing it in place to at most `side` pixels a side."""
    # With a gap, Pillow first shrinks by integer factors, which is fast, and filters from at least
    # twice the size.
    picture.thumbnail((side, side), reducing_gap=2.0)
    buffer = io.BytesIO()
    # Method 2 of 0 to 6: the report is rewritten during training, so speed matters more than size.
    picture.save(buffer, "WEBP", quality=QUALITY, method=2)
    return buffer.getvalue()


def _data_uri(mime: str, content: bytes) -> str:
    return f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"
