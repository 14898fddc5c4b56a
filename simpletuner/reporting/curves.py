"""Charts of the run record, thinned out so that a page stays small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
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
WAITS = {"data_seconds": "for data", "weights_seconds": "for weights"}
MEASURED = {
    "grad_norm": ("Gradient norm", "before clipping"),
    "grad_absmax": ("Largest gradient", "before clipping"),
    "seconds": ("Seconds per step", ""),
    "peak_memory_gb": ("Peak memory", "GB, the highest so far"),
}
# Columns that have a chart of their own, are no measurements, or would repeat the waits as shares of a step.
KNOWN = {"train_loss", "learning_rate", "mfu", *WAITS, *MEASURED, "step", "time", "epoch"}
KNOWN |= {"compute_share", "data_share", "weights_share"}


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
    charts = [*_loss_chart(metrics)]
    if points := metrics.points("learning_rate"):
        charts.append(Chart("Learning rate", [Series("learning rate", thin(points))]))
    for key, (title, note) in MEASURED.items():
        if points := metrics.points(key):
            charts.append(Chart(title, [smoothed(title.lower(), points)], note, log=key != "peak_memory_gb"))
    charts += [*_timestep_chart(metrics), *_waiting_chart(metrics)]
    if with_mfu and (points := metrics.points("mfu")):
        note = "model FLOP utilisation: the model's arithmetic as a share of the measured matmul rate"
        charts.append(Chart("MFU", [smoothed("mfu", points)], note, minor=True))
    for key in metrics.names:
        points = [] if key in KNOWN or key.startswith(EVALUATED) else metrics.points(key)
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
        kept.extend(sorted({min(stretch, key=itemgetter(1)), max(stretch, key=itemgetter(1))}))
    return kept


def _loss_chart(metrics: Columns) -> Iterator[Chart]:
    if points := metrics.points("train_loss"):
        loss = smoothed("loss", points)
        span = smoothing_span(len(points))
        note = f"faint: each step; line: smoothed over about {span} steps" if loss.smooth else ""
        evaluations = (
            Series(key.removeprefix("loss/"), thin(metrics.points(key))) for key in evaluation_names(metrics)
        )
        yield Chart("Loss", [loss, *evaluations], note, log=True)


def _waiting_chart(metrics: Columns) -> Iterator[Chart]:
    if series := [smoothed(name, points) for key, name in WAITS.items() if (points := metrics.points(key))]:
        yield Chart("Seconds of waiting", series, "part of each step", log=True, minor=True)


def _timestep_chart(metrics: Columns) -> Iterator[Chart]:
    """How often each noise level was trained."""
    if metrics.timesteps:
        width = NOISE_LEVELS // BARS
        bars = [(bar * width + width // 2, float(metrics.timesteps[bar])) for bar in range(BARS)]
        yield Chart("Timesteps", [Series("samples", bars)], "samples by noise level; 1000 is pure noise", bars=True)


def evaluation_names(metrics: Columns) -> list[str]:
    """The names of the evaluation losses in a record."""
    return [key for key in metrics.names if key.startswith(EVALUATED)]


def _compact(points: Sequence[Point]) -> list[list[float]]:
    return [[step, float(f"{value:.5g}")] for step, value in points]


def evaluation_points(metrics: Columns) -> list[Point]:
    """(step, evaluation loss) where it was measured: of the trained weights if possible, the mean over the datasets."""
    names = [name for name in sorted(evaluation_names(metrics)) if not name.endswith("/pooled")]
    plain = [name for name in names if not name.endswith("/ema")] or names
    curves = [dict(metrics.points(name)) for name in plain]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(step, sum(curve[step] for curve in curves) / len(curves)) for step in steps]
