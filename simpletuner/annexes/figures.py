"""Figures of a run for displays: pace and remaining time, curves, stills, and events as text."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from simpletuner.config.schema import NOISE_LEVELS
from simpletuner.reporting import events
from simpletuner.reporting.intervals import Rounds
from simpletuner.reporting.metrics import COMPUTE, DATA, EVALUATED, TIMESTEPS, WEIGHTS, shares
from simpletuner.reporting.step_figures import FIGURES
from simpletuner.reporting.wording import amount_text, clock_text, pace_text

BARS = 20  # of the histogram of timesteps
# The loss depends strongly on the sampled noise level; an average over about fifty steps shows the
# trend.
LOSS_MEMORY = 0.98
# The pace depends on the bucket, and the remaining time should follow it within about ten steps.
PACE_MEMORY = 0.9
# Points kept of the smoothed loss, which is drawn only a few characters wide.
LOSS_POINTS = 1000

Point = tuple[int, float]


class RunningMean:
    """Exponential moving average with bias correction.

    With memory m, every new value multiplies the weight of older ones by m. Dividing by the sum of
    the weights, 1 - m^n, removes the bias of early averages towards zero (Kingma and Ba 2015,
    section 3).
    """

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.value = self._weighted = self._weight = 0.0

    def add(self, value: float) -> float:
        """Add a value and return the average."""
        self._weighted = self.memory * self._weighted + (1 - self.memory) * value
        self._weight = self.memory * self._weight + (1 - self.memory)
        self.value = self._weighted / self._weight
        return self.value


class Pace:
    """Averages over the steps so far, and the remaining time.

    Args:
        rounds: recurring work between the steps, by kind.

    Attributes:
        loss: the smoothed loss.
        step: the last completed step of the run.
    """

    def __init__(
        self, total_steps: int, start_step: int, rounds: Mapping[str, Rounds] | None = None
    ) -> None:
        self.total_steps = total_steps
        self.start_step = self.step = start_step
        self.last: events.StepReport | None = None
        self.loss = 0.0
        self.losses = list[float]()
        self._rounds = rounds or {}
        self._round_seconds = {kind: round_.seconds for kind, round_ in self._rounds.items()}
        self._within_step = self._spent = 0.0
        self._loss_every = max(1, (total_steps - start_step) // LOSS_POINTS)
        self._loss = RunningMean(LOSS_MEMORY)
        self._seconds, self._data, self._weights, self._useful = (
            RunningMean(PACE_MEMORY) for _ in range(4)
        )

    @classmethod
    def of(cls, running: events.StateChanged) -> Pace:
        """The pace of a starting session."""
        return cls(running.total_steps, running.step, running.rounds)

    def note(self, event: events.Event) -> None:
        """Update the averages from an event with a duration; other events are ignored."""
        match event:
            case events.StepReport():
                self._add(event)
            case events.PhaseEnded() if event.complete:
                self._round_seconds[event.phase.kind] = event.seconds
                if (
                    event.phase.kind == events.CACHING
                ):  # a step that waits for new crops is not typical
                    self._within_step += event.seconds
            case events.CheckpointSaved():
                self._round_seconds[events.SAVING] = event.seconds

    def _add(self, step: events.StepReport) -> None:
        self.last = step
        self.step = step.step
        self._spent += step.seconds
        # The wait for the encoder is part of data_seconds; `remaining_seconds` counts it as a round
        # instead.
        caching = min(self._within_step, step.data_seconds)
        self._within_step = 0.0
        seconds = step.seconds - caching
        self._seconds.add(seconds)
        self._data.add(step.data_seconds - caching)
        self._weights.add(step.weights_seconds or 0.0)
        # Weighted by time: a mean of ratios would overrate fast steps.
        self._useful.add(seconds * (step.mfu or 0.0))
        self.loss = self._loss.add(step.loss)
        if self.steps_done % self._loss_every == 0:
            self.losses.append(self.loss)

    @property
    def seconds_per_step(self) -> float:
        return self._seconds.value

    @property
    def steps_done(self) -> int:
        """The number of steps in this session."""
        return self.step - self.start_step

    @property
    def is_complete(self) -> bool:
        return self.step >= self.total_steps

    @property
    def remaining_seconds(self) -> float:
        """Time to the end of the run: steps, and the previews, evaluations, saves and new crops
        between them.
        """
        steps = max(0, self.total_steps - self.step) * self._seconds.value
        return steps + sum(
            rounds.after(self.step, self.total_steps) * self._round_seconds[kind]
            for kind, rounds in self._rounds.items()
        )

    @property
    def shares(self) -> dict[str, float]:
        """How recent steps spent their time, as shares by kind."""
        streams = self.last is not None and self.last.weights_seconds is not None
        return shares(
            self._seconds.value, self._data.value, self._weights.value if streams else None
        )

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation of the recent steps, relative to the device's measured matmul
        rate, if known.
        """
        known = self.last is not None and self.last.mfu is not None and self._seconds.value > 0
        return self._useful.value / self._seconds.value if known else None

    @property
    def live(self) -> dict[str, float | None]:
        """The figures that displays show, by their name in events: averages, and otherwise those of
        the last step.
        """
        if self.last is None:
            return {}
        averages = {"train_loss": self.loss, "seconds": self.seconds_per_step}
        values = {}
        for figure in FIGURES:
            # Metrics that are shown as they are have their names already.
            if figure.title and figure.live_name not in self.last.metrics:
                values[figure.live_name] = averages.get(figure.name, figure.of(self.last))
        return values

    @property
    def speed(self) -> str:
        """How recent steps spent their time, and utilisation, as text."""
        density = None if self.last is None else self.last.density
        parts = {"MFU": self.mfu, "attention density": density}
        known = (
            f", {name} {share * 100:.0f} %" for name, share in parts.items() if share is not None
        )
        return shares_text(self.shares) + "".join(known)

    def summary(self) -> str:
        """One sentence for the end of a session."""
        if self.last is None:
            if self.is_complete:
                return (
                    f"No step was needed: the run had reached step {self.start_step} of "
                    f"{self.total_steps}."
                )
            return (
                f"No step was completed; the run is at step {self.start_step} of "
                f"{self.total_steps}."
            )
        time = f"{clock_text(self._spent)} ({pace_text(self._spent / max(1, self.steps_done))})"
        state = f"step {self.step} of {self.total_steps}, smoothed loss {self.loss:.4f}"
        return f"Trained {amount_text(self.steps_done, 'steps')} in {time}, {state}."


WORDED = {COMPUTE: "compute", WEIGHTS: "waiting for weights", DATA: "waiting for data"}


def shares_text(parts: dict[str, float]) -> str:
    """`compute 96 %, waiting for weights 3 %, waiting for data 1 %`"""
    return ", ".join(f"{WORDED[name]} {share * 100:.0f} %" for name, share in parts.items())


def line_of(event: events.Event) -> str:
    """The line that a display prints for an event; empty if a bar shows it already."""
    match event:
        case events.CheckpointSaved():
            removed = (
                f" (removed {', '.join(path.name for path in event.removed)})"
                if event.removed
                else ""
            )
            return f"Saved {event.path.name}{removed}"
        case events.Evaluated():
            losses = (
                f"{name.removeprefix(EVALUATED)} {loss:.5g}" for name, loss in event.losses.items()
            )
            return f"Evaluation loss at step {event.step}: {', '.join(losses)}"
        case events.Uploaded():
            return f"Uploaded {event.name}: {event.url}"
        case events.Notice():
            return f"warning: {event.text}" if event.warning else event.text
    return ""


def ending(event: events.PhaseEnded) -> str:
    """`1,204 captions in 4:05`, `stopped at 12/40 pictures (30 %)`, or `stopped`, of a phase that
    counts nothing.
    """
    if event.complete:
        return f"{amount_text(event.done, event.phase.unit)} in {clock_text(event.seconds)}"
    return (
        f"stopped at {reached(event.phase, event.done)}"
        if event.phase.total or event.done
        else "stopped"
    )


def reached(phase: events.PhaseStarted, done: int) -> str:
    """`12/40 pictures (30 %)`"""
    if not phase.total:
        return amount_text(done, phase.unit)
    return f"{done:,}/{amount_text(phase.total, phase.unit)} ({done * 100 // phase.total} %)"


@dataclass(eq=False)
class Columns:
    """The metrics of all steps by name, at 16 bytes a value; rows would take twenty times as much.

    Attributes:
        steps: oldest first.
        timesteps: histogram of the sampled timesteps, in `BARS` bins.
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    timesteps: Counter[int] = field(default_factory=Counter)
    _curves: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> Columns:
        """Build columns from rows."""
        columns = cls()
        for row in rows:
            columns.add(row)
        return columns

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row; rows of the same step are merged (losses, then an evaluation)."""
        if not self.steps or row["step"] != self.steps[-1]:
            self.steps.append(row["step"])
        for name, value in row.items():
            if name != "step" and is_number(value):
                steps, values = self._curves.get(name) or self._curves.setdefault(
                    name, (array("q"), array("d"))
                )
                if steps and steps[-1] == row["step"]:
                    values[-1] = value
                else:
                    steps.append(row["step"])
                    values.append(value)
        drawn = row.get(TIMESTEPS)
        for timestep in filter(is_number, drawn if isinstance(drawn, list) else ()):
            # Pure noise, 1000, falls into the last bin.
            self.timesteps[int(min(timestep, NOISE_LEVELS - 1)) * BARS // NOISE_LEVELS] += 1

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in order of first appearance."""
        return list(self._curves)

    def points(self, name: str) -> list[Point]:
        """(step, value) for all steps that have the metric."""
        return list(zip(*self._curves.get(name, ((), ())), strict=True))

    def only(self, names: Collection[str]) -> Columns:
        """The columns with these names."""
        return Columns(
            self.steps, _curves={name: self._curves[name] for name in self.names if name in names}
        )


def evaluation_names(metrics: Columns) -> list[str]:
    """The names of the evaluation losses in a record."""
    return [key for key in metrics.names if key.startswith(EVALUATED)]


def evaluation_points(metrics: Columns) -> list[Point]:
    """(step, evaluation loss), averaged over the datasets; of the trained weights if measured, else
    of the EMA.
    """
    # The pooled loss is a mean over the datasets already.
    names = [name for name in sorted(evaluation_names(metrics)) if not name.endswith("/pooled")]
    plain = [name for name in names if not name.endswith("/ema")] or names
    curves = [dict(metrics.points(name)) for name in plain]
    # Only steps at which all datasets were evaluated: means over different datasets are not
    # comparable.
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return [(step, sum(curve[step] for curve in curves) / len(curves)) for step in steps]


def is_number(value: Any) -> bool:
    """Whether a value is a finite number and not a boolean."""
    # Not isinstance, since true is an int; NaN fails the comparison.
    return type(value) in (float, int) and abs(value) <= sys.float_info.max


def still(path: Path) -> Image.Image:
    """A picture, or the middle frame of a clip."""
    if path.suffix != ".mp4":
        with Image.open(path) as picture:
            return picture.convert("RGB")
    import av  # imported here, since most displays decode no clips

    with av.open(str(path)) as clip:
        # `frames` is 0 if the file does not store it.
        middle = clip.streams.video[0].frames // 2
        return next(islice(clip.decode(video=0), middle, None)).to_image()
