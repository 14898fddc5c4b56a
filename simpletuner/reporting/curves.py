"""Charts of the run record, thinned out so that a page stays small."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from simpletuner.config.schema import NOISE_LEVELS
from simpletuner.reporting.events import EVALUATED
from simpletuner.reporting.metrics import BARS, Columns, Point
from simpletuner.reporting.pace import RunningMean

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


def charts_of(metrics: Columns, *, with_mfu: bool = True) -> list[Chart]:
    """A chart of every recorded metric, the most important first.

    Args:
        with_mfu: include model FLOP utilisation, which means little on a CPU.
    """
    charts = [chart for chart in (_loss_chart(metrics), _learning_rate_chart(metrics)) if chart]
    taken = {"train_loss", "learning_rate", "mfu", *WAITS, *SHARES, *evaluation_names(metrics)}
    for key, title, note in (
        ("grad_norm", "Gradient norm", "before clipping"),
        ("grad_absmax", "Largest gradient", "before clipping"),
        ("seconds", "Seconds per step", ""),
        ("peak_memory_gb", "Peak memory", "GB, the highest so far"),
    ):
        taken.add(key)
        if points := metrics.points(key):
            charts.append(Chart(title, [smoothed(title.lower(), points)], note, log=key != "peak_memory_gb"))
    charts += [chart for chart in (_timestep_chart(metrics), _waiting_chart(metrics)) if chart]
    if with_mfu and (points := metrics.points("mfu")):
        note = "model FLOP utilisation: the model's arithmetic as a share of the measured matmul rate"
        charts.append(Chart("MFU", [smoothed("mfu", points)], note, minor=True))
    for key in metrics.names:
        points = [] if key in taken | BOOKKEEPING else metrics.points(key)
        if len(points) > 1:
            charts.append(Chart(key, [smoothed(key, points)], log=all(value > 0 for _, value in points), minor=True))
    return charts


def hours_of(metrics: Columns) -> list[Point]:
    """(step, hours spent in steps so far), for charts over time; time between sessions does not count."""
    points = metrics.points("seconds")
    spent = accumulate(seconds / 3600 for _, seconds in points)
    return thin([(step, hours) for (step, _), hours in zip(points, spent, strict=True)])


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


def _loss_chart(metrics: Columns) -> Chart | None:
    points = metrics.points("train_loss")
    if not points:
        return None
    evaluations = [Series(key.removeprefix("loss/"), thin(metrics.points(key))) for key in evaluation_names(metrics)]
    loss = smoothed("loss", points)
    note = f"faint: each step; line: smoothed over about {smoothing_span(len(points))} steps" if loss.smooth else ""
    return Chart("Loss", [loss, *evaluations], note, log=True)


def _learning_rate_chart(metrics: Columns) -> Chart | None:
    points = metrics.points("learning_rate")
    return Chart("Learning rate", [Series("learning rate", thin(points))]) if points else None


def _waiting_chart(metrics: Columns) -> Chart | None:
    found = {name: points for key, name in WAITS.items() if (points := metrics.points(key))}
    series = [smoothed(name, points) for name, points in found.items()]
    return Chart("Seconds of waiting", series, "part of each step", log=True, minor=True) if series else None


def _timestep_chart(metrics: Columns) -> Chart | None:
    """How often each noise level was trained."""
    if not metrics.timesteps:
        return None
    width = NOISE_LEVELS // BARS
    bars = [(bar * width + width // 2, float(metrics.timesteps[bar])) for bar in range(BARS)]
    return Chart("Timesteps", [Series("samples", bars)], "samples by noise level; 1000 is pure noise", bars=True)


def evaluation_names(metrics: Columns) -> list[str]:
    """The names of the evaluation losses in a record."""
    return [key for key in metrics.names if key.startswith(EVALUATED)]


def _compact(points: Sequence[Point]) -> list[list[float]]:
    return [[step, float(f"{value:.5g}")] for step, value in points]


def _value(point: Point) -> float:
    return point[1]
