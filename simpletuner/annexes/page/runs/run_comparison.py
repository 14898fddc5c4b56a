"""Several runs side by side: their curves in one chart, the settings that differ, last previews."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from simpletuner.annexes.figures import Columns, evaluation_names
from simpletuner.annexes.page.project import Project, Refusal, project_of
from simpletuner.annexes.page.runs.live import drawing, runs_of
from simpletuner.annexes.page.runs.previews import address
from simpletuner.annexes.page.runs.run_list import ListedRun, listed_run
from simpletuner.annexes.page.settings.files import Configuration
from simpletuner.annexes.page.settings.form import label_of
from simpletuner.annexes.report import html
from simpletuner.annexes.report.html import Chart, Series, charts_of, grid_order, thin
from simpletuner.annexes.runs.folder import as_text
from simpletuner.annexes.runs.log_files import record_in
from simpletuner.annexes.runs.run import Run
from simpletuner.config.json_reader import read_json
from simpletuner.config.schema import all_options
from simpletuner.config.types import as_user_text
from simpletuner.errors import Problems, UserError
from simpletuner.planning.checkpoint_folder import Checkpoint, find_checkpoints
from simpletuner.redaction import redact_settings, redact_texts
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, MediaRecord, read_media

FEWEST = 2
MOST = 6  # more curves in a chart cannot be told apart
ROWS = 24  # prompts
HELD_OUT = "Held-out loss"
FIRST = ("Loss", HELD_OUT)  # charts before all others
SMOOTHED = "faint: each step; line: smoothed"
FILES = "files"  # in place of a setting: what was trained on
SIZES = ".resolution"  # suffix of the key of a manifest with the numbers of files by size
UNKNOWN = "not known"
DIFFERENT = ("output_dir",)  # of any two runs


@dataclass(frozen=True)
class ComparedRun:
    """A run in the comparison.

    Attributes:
        name: unique among the compared runs.
        of_config: the settings are those of the config as it is now, since no checkpoint has them.
    """

    run: Run
    name: str
    listed: ListedRun
    settings: Mapping[str, Any]
    of_config: bool


@dataclass(frozen=True)
class Difference:
    """A setting that differs, and its heading in the form; `values` has one text a run."""

    label: str
    section: str
    key: str
    values: Sequence[str]


@dataclass(frozen=True)
class Shot:
    """The last preview of a prompt by a run; None if the run does not render it."""

    run: str
    record: MediaRecord | None
    source: str = ""


def show_comparison(request: Request) -> Response:
    """Two to six runs side by side: `?run=ID&run=ID`."""
    try:
        chosen = chosen_runs(request)
    except Refusal as refusal:
        # A person may come here by a bookmark, after a run was renamed or archived.
        page = html.render("page/runs/run_comparison.html.jinja", columns=[], problem=str(refusal))
        return HTMLResponse(page, refusal.status)
    columns = columns_of(project_of(request), chosen)
    with drawing:
        charts, chart_data = overlaid({column.name: curves_of(column.run) for column in columns})
    page = html.render(
        "page/runs/run_comparison.html.jinja",
        problem="",
        columns=columns,
        charts=charts,
        chart_data=chart_data,
        differences=differing_settings(columns),
        rows=shared_previews(columns),
        is_live=any(column.listed.is_active for column in columns),
    )
    return HTMLResponse(page)


def chosen_runs(request: Request) -> list[Run]:
    """The runs that a request names, in its order.

    Raises:
        Refusal: 400 if there are too few or too many, 404 if there is no such run.
    """
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not FEWEST <= len(names) <= MOST:
        raise Refusal(400, f"{FEWEST} to {MOST} runs can be compared, not {len(names)}.")
    return [runs_of(request).find(name) for name in names]


def columns_of(project: Project, runs: Sequence[Run]) -> list[ComparedRun]:
    """The compared runs, with what is known of them."""
    short = [run.name for run in runs]
    columns = []
    for run in runs:
        name = run.name
        if short.count(name) > 1 and run.folder.is_relative_to(project.folder):
            name = as_text(run.folder.relative_to(project.folder))
        settings, of_config = recorded_settings(project, run)
        columns.append(ComparedRun(run, name, listed_run(run), settings, of_config))
    return columns


# ---- Curves ----


def overlaid(curves: Mapping[str, Sequence[Chart]]) -> tuple[list[Chart], dict[str, Any]]:
    """Charts in which every run has its colour, and their data for curves.js.

    Args:
        curves: the charts of every run by its name; the lines are named after it.
    """
    charts: dict[str, Chart] = {}
    colours: dict[str, list[int]] = {}
    for place, (name, of_run) in enumerate(curves.items()):
        for chart in of_run:
            lines = [replace(line, name=f"{name}{line.name}") for line in chart.series]
            known = charts.get(chart.title, replace(chart, series=[]))
            charts[chart.title] = replace(known, series=[*known.series, *lines])
            colours.setdefault(chart.title, []).extend([place] * len(lines))
    ordered = sorted(charts.values(), key=lambda chart: chart.title not in FIRST)
    data = []
    for chart in ordered:
        drawn = chart.to_json()
        for line, colour in zip(drawn["series"], colours[chart.title], strict=True):
            line["colour"] = colour
        data.append(drawn)
    # Runs differ in pace, so they are compared over steps only.
    return ordered, {"charts": data, "hours": []}


def curves_of(run: Run) -> Sequence[Chart]:
    """The charts of a run; the names of their lines are what follows the name of the run."""
    record = run.folder / METRICS_FILE
    if not record.is_file():
        return ()
    status = record.stat()
    return _curves_at(run.folder, status.st_size, status.st_mtime_ns)


# The curves of 100,000 steps take a second, and are a hundredth of the record.
@lru_cache(maxsize=4 * MOST)
def _curves_at(folder: Path, size: int, changed: int) -> Sequence[Chart]:
    """The charts of the record in a folder, of this size and time of change."""
    metrics = record_in(folder).read()[0]
    charts = []
    for chart in charts_of(metrics, with_mfu=False):
        if chart.bars or chart.minor:
            continue
        note = SMOOTHED if chart.title == "Loss" else chart.note
        # The loss also has lines of evaluations, which get a chart.
        charts.append(replace(chart, note=note, series=[replace(chart.series[0], name="")]))
    return (*charts, *_held_out(metrics))


def _held_out(metrics: Columns) -> Iterator[Chart]:
    """The evaluation losses of a run."""
    keys = evaluation_names(metrics)
    lines = []
    for key in keys:
        name = "" if len(keys) == 1 else f": {key.rpartition('/')[2]}"
        lines.append(Series(name, thin(metrics.points(key))))
    if lines:
        yield Chart(HELD_OUT, lines, "lower is better", log=True)


# ---- Settings ----


def recorded_settings(project: Project, run: Run) -> tuple[dict[str, Any], bool]:
    """The settings of a run without secrets, and whether they are those of its config today.

    The newest checkpoint has the settings that were trained with. Empty if nothing is known.
    """
    with suppress(OSError, UserError):
        saves, _incomplete = find_checkpoints(run.folder)
        if saves:
            recorded = read_json(saves[-1].path / "config.json", Problems(), dict)
            if recorded is not None:
                return redact_settings(recorded | files_trained_on(saves[-1])), False
    with suppress(OSError, UserError):
        if run.config:
            judgement, _, _ = Configuration.saved(project, run.config, run.settings).judge()
            return redact_settings(dict(judgement.config.flat)), True
    return {}, False


def files_trained_on(checkpoint: Checkpoint) -> dict[str, str]:
    """The datasets of a checkpoint with the numbers of their files, as one more setting."""
    identity = checkpoint.manifest.identity
    texts = []
    for key, sizes in identity.order.items():
        if key.endswith(SIZES):
            count = sum(int(str(size).partition(" ")[0]) for size in sizes)
            texts.append(f"{key.removesuffix(SIZES)}: {count:,}")
    # The same numbers may be of other files, so a digest tells them apart.
    return {FILES: f"{', '.join(texts)} ({identity.datasets[:6]})"}


def differing_settings(columns: Sequence[ComparedRun]) -> list[Difference]:
    """The settings in which the runs differ, in the order of the form."""
    labels = {FILES: ("Files trained on", "Data")}
    labels |= {key: (label_of(option), option.section) for key, option in all_options().items()}
    found = []
    for key, (label, section) in labels.items():
        if key not in DIFFERENT and _differs(columns, key):
            texts = [_as_text(column.settings, key) for column in columns]
            found.append(Difference(label, section, key, texts))
    return found


def _differs(columns: Sequence[ComparedRun], key: str) -> bool:
    """Whether a setting differs among the runs whose settings are known."""
    values = [column.settings.get(key) for column in columns if column.settings]
    if key == FILES:
        values = [value for value in values if value is not None]
    return any(value != values[0] for value in values[1:])


def _as_text(settings: Mapping[str, Any], key: str) -> str:
    """A setting for the table."""
    value = settings.get(key)
    if not settings or (value is None and key not in settings):
        return UNKNOWN
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(redact_texts({key: as_user_text(value)})[key])


# ---- Previews ----


def shared_previews(columns: Sequence[ComparedRun]) -> list[tuple[str, str, list[Shot]]]:
    """The prompts that several runs render: short name, prompt, and the last preview of each."""
    last: dict[str, dict[str, MediaRecord]] = {}  # by prompt, then by the name of the run
    for column in columns:
        for record in read_media(column.run.folder / MEDIA_FILE):
            if not record.ema and (column.run.folder / record.path).is_file():
                last.setdefault(record.prompt, {})[column.name] = record
    shared = [records for records in last.values() if len(records) > 1]
    shared.sort(key=lambda records: grid_order(next(iter(records.values()))))
    rows = []
    for records in shared[:ROWS]:
        first = next(iter(records.values()))
        shots = [_shot(column, records.get(column.name)) for column in columns]
        rows.append((first.short_name, first.prompt, shots))
    return rows


def _shot(column: ComparedRun, record: MediaRecord | None) -> Shot:
    source = "" if record is None else address(column.run, Path(record.path).as_posix())
    return Shot(column.name, record, source)
