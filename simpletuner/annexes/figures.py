"""Figures of a run for displays: pace and remaining time, curves, stills, and events as text."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean
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


# Rounds that follow a step; an evaluation and new crops are over when the step is reported.
AFTER_STEPS = {events.PREVIEWS, events.SAVING}


class RunningMean:
    """Exponential moving average with bias correction.

    With memory m, every new value multiplies the weight of older ones by m. Dividing by the sum of
    the weights, 1 - m^n, removes the bias of early averages towards zero (Kingma and Ba 2015,
    section 3).
    """

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.value = 0.0
        self._weighted = 0.0  # sum of the values, weighted
        self._weight = 0.0  # sum of the weights

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
        step_seconds: expected duration of a step, until one has been measured; 0 if unknown.

    Attributes:
        loss: the smoothed loss.
        step: the last completed step of the run.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int,
        rounds: Mapping[str, Rounds] | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        self.total_steps = total_steps
        self.start_step = start_step
        self.step = start_step
        self.last: events.StepReport | None = None
        self.loss = 0.0
        self.losses = list[float]()
        self._rounds = rounds or {}
        self._round_seconds = {kind: round_.seconds for kind, round_ in self._rounds.items()}
        # Seconds left of the rounds that follow the last step, by kind.
        self._due: dict[str, float] = {}
        self._planned = step_seconds
        self._spent = 0.0  # seconds in all steps
        self._caching = 0.0  # seconds that the next step has waited for new crops
        self._loss_every = max(1, (total_steps - start_step) // LOSS_POINTS)
        self._loss = RunningMean(LOSS_MEMORY)
        # All in seconds a step: the duration, the waits for data and for weights, and the time that
        # its arithmetic would take at the measured matmul rate.
        self._seconds = RunningMean(PACE_MEMORY)
        self._data = RunningMean(PACE_MEMORY)
        self._weights = RunningMean(PACE_MEMORY)
        self._useful = RunningMean(PACE_MEMORY)

    @classmethod
    def of(cls, running: events.StateChanged) -> Pace:
        """The pace of a starting session."""
        return cls(running.total_steps, running.step, running.rounds, running.step_seconds)

    def note(self, event: events.Event) -> None:
        """Update the averages from an event with a duration; other events are ignored."""
        match event:
            case events.StepReport():
                self._add(event)
                self._due = self._rounds_after(event.step)
            case events.PhaseAdvanced() if event.phase.kind in self._due and event.phase.total:
                left = max(0.0, 1 - event.done / event.phase.total)
                self._due[event.phase.kind] = left * self._round_seconds[event.phase.kind]
            case events.PhaseEnded():
                self._due.pop(event.phase.kind, None)
                if event.complete:
                    self._end_round(event.phase.kind, event.seconds)
            case events.CheckpointSaved():
                self._due.pop(events.SAVING, None)
                self._round_seconds[events.SAVING] = event.seconds

    def _end_round(self, kind: str, seconds: float) -> None:
        self._round_seconds[kind] = seconds
        if kind == events.CACHING:
            self._caching += seconds  # is part of the next step, which is not typical

    def _rounds_after(self, step: int) -> dict[str, float]:
        """The expected seconds of the rounds that follow a step at once."""
        due = {}
        for kind in AFTER_STEPS & self._rounds.keys():
            rounds = self._rounds[kind]
            before = rounds.after(step - 1, self.total_steps)
            if before > rounds.after(step, self.total_steps):
                due[kind] = self._round_seconds[kind]
        return due

    def _add(self, step: events.StepReport) -> None:
        self.last = step
        self.step = step.step
        self._spent += step.seconds
        # The wait for the encoder is part of data_seconds; `remaining_seconds` counts it as a round
        # instead.
        caching = min(self._caching, step.data_seconds)
        self._caching = 0.0
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
        """Time to the end of the run: of steps, and of the rounds between them.

        Rounds are previews, evaluations, saves and new crops.
        """
        step_seconds = self._seconds.value if self.last else self._planned
        seconds = max(0, self.total_steps - self.step) * step_seconds
        seconds += sum(self._due.values())
        for kind, rounds in self._rounds.items():
            seconds += rounds.after(self.step, self.total_steps) * self._round_seconds[kind]
        return seconds

    @property
    def shares(self) -> dict[str, float]:
        """How recent steps spent their time, as shares by kind."""
        streams = self.last is not None and self.last.weights_seconds is not None
        weights_seconds = self._weights.value if streams else None
        return shares(self._seconds.value, self._data.value, weights_seconds)

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation of recent steps, as a share of the measured matmul rate.

        None if steps do not report it.
        """
        if self.last is None or self.last.mfu is None or self._seconds.value <= 0:
            return None
        return self._useful.value / self._seconds.value

    @property
    def live(self) -> dict[str, float | None]:
        """The figures that displays show, by their name in events.

        Loss and duration are averages, all other figures those of the last step.
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
        text = shares_text(self.shares)
        if self.mfu is not None:
            text += f", MFU {self.mfu * 100:.0f} %"
        if self.last is not None and self.last.density is not None:
            text += f", attention density {self.last.density * 100:.0f} %"
        return text

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


SHARE_NAMES = {COMPUTE: "compute", WEIGHTS: "waiting for weights", DATA: "waiting for data"}


def shares_text(parts: dict[str, float]) -> str:
    """`compute 96 %, waiting for weights 3 %, waiting for data 1 %`"""
    return ", ".join(f"{SHARE_NAMES[name]} {share * 100:.0f} %" for name, share in parts.items())


def line_of(event: events.Event) -> str:
    """The line that a display prints for an event; empty if a bar shows it already."""
    match event:
        case events.CheckpointSaved():
            line = f"Saved {event.path.name}"
            if event.removed:
                line += f" (removed {', '.join(path.name for path in event.removed)})"
            return line
        case events.Evaluated():
            losses = [
                f"{name.removeprefix(EVALUATED)} {loss:.5g}" for name, loss in event.losses.items()
            ]
            return f"Evaluation loss at step {event.step}: {', '.join(losses)}"
        case events.Uploaded():
            return f"Uploaded {event.name}: {event.url}"
        case events.Notice():
            return f"warning: {event.text}" if event.warning else event.text
    return ""


def ending(event: events.PhaseEnded) -> str:
    """`1,204 captions in 4:05`, `stopped at 12/40 pictures (30 %)`, or `stopped`."""
    if event.complete:
        return f"{amount_text(event.done, event.phase.unit)} in {clock_text(event.seconds)}"
    if not event.phase.total and not event.done:
        return "stopped"  # a phase that counts nothing
    return f"stopped at {reached(event.phase, event.done)}"


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
        step = row["step"]
        if not self.steps or step != self.steps[-1]:
            self.steps.append(step)
        for name, value in row.items():
            if name != "step" and is_number(value):
                self._add_value(name, step, value)
        timesteps = row.get(TIMESTEPS)
        if not isinstance(timesteps, list):
            return
        for timestep in filter(is_number, timesteps):
            level = int(min(timestep, NOISE_LEVELS - 1))  # pure noise, 1000, is in the last bin
            self.timesteps[level * BARS // NOISE_LEVELS] += 1

    def _add_value(self, name: str, step: int, value: float) -> None:
        """Add a value to a curve, or replace the value of the same step."""
        if name not in self._curves:
            self._curves[name] = (array("q"), array("d"))
        steps, values = self._curves[name]
        if steps and steps[-1] == step:
            values[-1] = value
        else:
            steps.append(step)
            values.append(value)

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in order of first appearance."""
        return list(self._curves)

    def points(self, name: str) -> list[Point]:
        """(step, value) for all steps that have the metric."""
        if name not in self._curves:
            return []
        steps, values = self._curves[name]
        return list(zip(steps, values, strict=True))

    def only(self, names: Collection[str]) -> Columns:
        """The columns with these names."""
        curves = {name: curve for name, curve in self._curves.items() if name in names}
        return Columns(self.steps, _curves=curves)


def evaluation_names(metrics: Columns) -> list[str]:
    """The names of the evaluation losses in a record."""
    return [key for key in metrics.names if key.startswith(EVALUATED)]


def evaluation_points(metrics: Columns) -> list[Point]:
    """(step, evaluation loss), averaged over the datasets.

    The loss is that of the trained weights if measured, else of the EMA.
    """
    # The pooled loss is a mean over the datasets already.
    names = [name for name in sorted(evaluation_names(metrics)) if not name.endswith("/pooled")]
    of_trained = [name for name in names if not name.endswith("/ema")]
    curves = [dict(metrics.points(name)) for name in of_trained or names]
    if not curves:
        return []
    # Only steps at which all datasets were evaluated: means over different datasets are not
    # comparable.
    steps = sorted(set.intersection(*map(set, curves)))
    return [(step, sum(curve[step] for curve in curves) / len(curves)) for step in steps]


def course_of_loss(metrics: Columns) -> Iterator[tuple[str, str]]:
    """The training loss at the beginning and the end, as a name and a text; nothing without steps.

    Means of tenths, since single losses depend on the sampled noise level.
    """
    losses = [value for _, value in metrics.points("train_loss")]
    if losses:
        tenth = max(1, len(losses) // 10)
        first = fmean(losses[:tenth])
        last = fmean(losses[-tenth:])
        yield "Loss, first to last tenth", f"{first:.3g} → {last:.3g}"


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
        # `frames` is 0 if the file does not store it; the first frame is shown then.
        middle = clip.streams.video[0].frames // 2
        return next(islice(clip.decode(video=0), middle, None)).to_image()
