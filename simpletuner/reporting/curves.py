"""Charts from the rows of the run record, thinned out so that a page stays small."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from simpletuner.reporting.events import EVALUATED
from simpletuner.reporting.pace import RunningMean

Point = tuple[int, float]

POINTS = 1000  # more than a chart has pixels
# A curve is smoothed over this share of its length, within these bounds in steps.
SMOOTHING_SHARE, SHORTEST_SPAN, LONGEST_SPAN = 0.05, 5, 200
# A curve that travels this many times its range is noisy; a schedule goes up and down once or twice.
NOISY_TRAVEL = 4
# Columns that are not measurements.
BOOKKEEPING = frozenset({"step", "time", "epoch"})
WAITS = {"data_seconds": "for data", "weights_seconds": "for weights"}
# The same waits as shares of a step; charts of them would repeat the curves.
SHARES = ("compute_share", "data_share", "weights_share")
TIMESTEPS = 1000  # the largest timestep: pure noise
BARS = 20


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
        note: how to read it, briefly.
        log: offer a logarithmic axis.
        minor: shown only on request.
        bars: a histogram instead of curves; x is not a step.
    """

    title: str
    series: Sequence[Series]
    note: str = ""
    log: bool = False
    minor: bool = False
    bars: bool = False

    def to_json(self) -> dict[str, Any]:
        """What `curves.js` draws."""
        return {
            "title": self.title,
            "bars": self.bars,
            "series": [
                {"name": series.name, "raw": _compact(series.raw), "smooth": _compact(series.smooth)}
                for series in self.series
            ],
        }


def charts_of(rows: Sequence[Mapping[str, Any]], *, with_mfu: bool = True) -> list[Chart]:
    """A chart of every recorded metric, the most important first.

    Args:
        with_mfu: include model FLOP utilisation, which means little on a CPU.
    """
    charts = [chart for chart in (_loss_chart(rows), _learning_rate_chart(rows)) if chart]
    taken = {"train_loss", "learning_rate", "mfu", *WAITS, *SHARES, *evaluation_names(rows)}
    for key, title, note in (
        ("grad_norm", "Gradient norm", "before clipping"),
        ("grad_absmax", "Largest gradient", "before clipping"),
        ("seconds", "Seconds per step", ""),
        ("peak_memory_gb", "Peak memory", "GB, the highest so far"),
    ):
        taken.add(key)
        if points := points_of(rows, key):
            charts.append(Chart(title, [smoothed(title.lower(), points)], note, log=key != "peak_memory_gb"))
    charts += [chart for chart in (_timestep_chart(rows), _waiting_chart(rows)) if chart]
    if with_mfu and (points := points_of(rows, "mfu")):
        note = "model FLOP utilisation: the model's arithmetic as a share of the measured matmul rate"
        charts.append(Chart("MFU", [smoothed("mfu", points)], note, minor=True))
    for key in _keys(rows):
        points = [] if key in taken else points_of(rows, key)
        if len(points) > 1:
            charts.append(Chart(key, [smoothed(key, points)], log=all(value > 0 for _, value in points), minor=True))
    return charts


def hours_of(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """(step, hours spent in steps so far), for charts over time; time between sessions does not count."""
    spent = accumulate(seconds / 3600 for _, seconds in points_of(rows, "seconds"))
    return thin([(step, hours) for (step, _), hours in zip(points_of(rows, "seconds"), spent, strict=True)])


def points_of(rows: Iterable[Mapping[str, Any]], key: str) -> list[Point]:
    """(step, value) of every row whose metric is a number; true and false are not."""
    return [
        (row["step"], float(row[key]))
        for row in rows
        if isinstance(row.get(key), int | float) and not isinstance(row[key], bool)
    ]


def smoothed(name: str, points: Sequence[Point]) -> Series:
    """The thinned points, and for a noisy curve a running average over a twentieth of it."""
    if not is_noisy(points):
        return Series(name, thin(points))
    mean = RunningMean(1 - 1 / smoothing_span(len(points)))
    averages = [(step, mean.add(value)) for step, value in points]
    return Series(name, thin_extremes(points), thin(averages))


def is_noisy(points: Sequence[Point]) -> bool:
    """Whether a running average helps; a clean schedule it would only delay."""
    values = [value for _, value in points]
    travelled = sum(abs(after - before) for before, after in pairwise(values))
    return len(values) > SHORTEST_SPAN and travelled > NOISY_TRAVEL * (max(values) - min(values))


def smoothing_span(count: int) -> int:
    """Number of steps over which a curve of `count` points is averaged."""
    return round(min(max(count * SMOOTHING_SHARE, SHORTEST_SPAN), LONGEST_SPAN))


def thin(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """At most `limit` evenly spaced points, including the first and the last."""
    if len(points) <= limit:
        return list(points)
    last = len(points) - 1
    return [points[round(index * last / (limit - 1))] for index in range(limit)]


def thin_extremes(points: Sequence[Point], limit: int = POINTS) -> list[Point]:
    """At most `limit` points: the lowest and highest of each stretch, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    stretches = limit // 2
    edges = [index * len(points) // stretches for index in range(stretches + 1)]
    kept: list[Point] = []
    for low, high in pairwise(edges):
        stretch = points[low:high]
        extremes = {min(stretch, key=_value), max(stretch, key=_value)}
        kept.extend(sorted(extremes))
    return kept


def _loss_chart(rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    points = points_of(rows, "train_loss")
    if not points:
        return None
    evaluations = [Series(key.removeprefix("loss/"), thin(points_of(rows, key))) for key in evaluation_names(rows)]
    loss = smoothed("loss", points)
    note = f"faint: each step; line: smoothed over about {smoothing_span(len(points))} steps" if loss.smooth else ""
    return Chart("Loss", [loss, *evaluations], note, log=True)


def _learning_rate_chart(rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    points = points_of(rows, "learning_rate")
    return Chart("Learning rate", [Series("learning rate", thin(points))]) if points else None


def _waiting_chart(rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    found = {name: points for key, name in WAITS.items() if (points := points_of(rows, key))}
    series = [smoothed(name, points) for name, points in found.items()]
    return Chart("Seconds of waiting", series, "part of each step", log=True, minor=True) if series else None


def _timestep_chart(rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    """How often each noise level was trained."""
    width = TIMESTEPS // BARS
    drawn = Counter(min(BARS - 1, int(each) // width) for row in rows for each in row.get("timesteps") or ())
    if not drawn:
        return None
    bars = [(bar * width + width // 2, float(drawn[bar])) for bar in range(BARS)]
    return Chart("Timesteps", [Series("samples", bars)], "samples by noise level; 1000 is pure noise", bars=True)


def evaluation_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the evaluation losses in a record."""
    return [key for key in _keys(rows) if key.startswith(EVALUATED)]


def _keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of all metrics, in the order in which they first appear."""
    return [key for key in dict.fromkeys(key for row in rows for key in row) if key not in BOOKKEEPING]


def _compact(points: Sequence[Point]) -> list[list[float]]:
    return [[step, float(f"{value:.5g}")] for step, value in points]


def _value(point: Point) -> float:
    return point[1]
