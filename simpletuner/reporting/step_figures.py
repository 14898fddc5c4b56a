"""The figures of a step: how they are recorded, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from simpletuner.reporting.events import StepReport
from simpletuner.reporting.metrics import COMPUTE, DATA, TIMESTEPS, WEIGHTS, Value, shares
from simpletuner.reporting.wording import pace_text, size_text


@dataclass(frozen=True)
class Curve:
    """A chart of the report.

    Attributes:
        note: a short explanation.
        log: offer a logarithmic axis.
    """

    title: str
    note: str = ""
    log: bool = True


@dataclass(frozen=True)
class Figure:
    """A number of every step.

    Attributes:
        name: its name in `training_metrics.jsonl` and for trackers.
        value: computes it; None if it is one of the step's metrics already.
        unit, digits: it is recorded in this unit, rounded to this number of decimals.
        title: its name at the head of a run on the page; empty if it is not shown while the run
            trains.
        text: formats it on the page.
        live: its name in events, if it differs: they have averages over recent steps, and sizes in
            bytes.
        short, short_text: its name in the terminal, and its format if not `text`.
        curve: its chart in the report; by default one of those that are shown on request.
        has_curve: false for figures whose chart is drawn separately, and for those without one.
    """

    name: str
    value: Callable[[StepReport], float | None] | None = None
    unit: float = 1.0
    digits: int = 6
    title: str = ""
    text: Callable[[float], str] = "{:.4g}".format
    live: str = ""
    short: str = ""
    short_text: Callable[[float], str] | None = None
    curve: Curve | None = None
    has_curve: bool = True

    @property
    def live_name(self) -> str:
        return self.live or self.name

    def of(self, step: StepReport) -> float | None:
        """Its value in a step; None if it is unknown."""
        return step.metrics.get(self.name) if self.value is None else self.value(step)

    def in_terminal(self, value: float) -> str:
        """The value in the words of the terminal."""
        return (self.short_text or self.text)(value)


def _share(part: str, step: StepReport) -> float | None:
    return shares(step.seconds, step.data_seconds, step.weights_seconds).get(part)


# Shown in this order. A new figure is a line here and the function that computes it, or a metric
# that a technique or the recorder adds to the step.
FIGURES = [
    Figure(
        "train_loss",
        title="Loss, smoothed",
        live="smoothed_loss",
        short="loss",
        short_text="{:.4f}".format,
        has_curve=False,
    ),
    Figure("grad_norm", curve=Curve("Gradient norm", "before clipping")),
    Figure("grad_absmax", curve=Curve("Largest gradient", "before clipping")),
    Figure(
        "seconds",
        lambda step: step.seconds,
        title="Speed",
        text=pace_text,
        live="seconds_per_step",
        short="pace",
        curve=Curve("Seconds per step"),
    ),
    Figure(
        "learning_rate",
        title="Learning rate",
        text="{:.3g}".format,
        short="lr",
        short_text="{:.2e}".format,
        has_curve=False,
    ),
    Figure("data_seconds", lambda step: step.data_seconds, has_curve=False),
    Figure("weights_seconds", lambda step: step.weights_seconds, has_curve=False),
    Figure("mfu", lambda step: step.mfu, has_curve=False),
    Figure("compute_share", partial(_share, COMPUTE), has_curve=False),
    Figure("weights_share", partial(_share, WEIGHTS), has_curve=False),
    Figure("data_share", partial(_share, DATA), has_curve=False),
    Figure(
        "attention_density",
        lambda step: step.density,
        digits=4,
        curve=Curve("Attention density", "share of the tiles that block-sparse attention visits"),
    ),
    Figure(
        "peak_memory_gb",
        lambda step: step.memory_bytes,
        unit=1e9,
        digits=3,  # further digits would be noise
        title="Peak memory",
        text=lambda size: f"{size / 1e9:.2f} GB",
        live="memory_bytes",
        short="memory",
        short_text=lambda size: size_text(round(size)),
        curve=Curve("Peak memory", "GB, the highest so far", log=False),
    ),
    Figure("reserved_memory_gb", lambda step: step.reserved_bytes, unit=1e9, digits=3),
]


def row_of(step: StepReport) -> dict[str, Value]:
    """The line of a step in the record and for trackers: metrics, known figures, timesteps."""
    row: dict[str, Value] = dict(step.metrics)
    for figure in FIGURES:
        if figure.value is None:
            continue
        value = figure.value(step)
        if value is not None:
            row[figure.name] = round(value / figure.unit, figure.digits)
    row[TIMESTEPS] = [round(timestep, 1) for timestep in step.timesteps]
    return row
