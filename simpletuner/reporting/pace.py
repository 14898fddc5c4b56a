"""Running averages of the steps, and numbers worded for people."""

from __future__ import annotations

from collections.abc import Mapping

from simpletuner.reporting.events import (
    CACHING,
    EVALUATED,
    SAVING,
    CheckpointSaved,
    Evaluated,
    Event,
    MediaRendered,
    Notice,
    PhaseEnded,
    PhaseStarted,
    PreviewGrew,
    Rounds,
    StateChanged,
    StepReport,
    Uploaded,
)
from simpletuner.reporting.metrics import COMPUTE, DATA, WEIGHTS, shares

# The loss depends strongly on the noise level that was drawn; an average over some fifty steps shows the trend.
LOSS_MEMORY = 0.98
# The pace changes with the bucket, and the remaining time should follow it within some ten steps.
PACE_MEMORY = 0.9
# Points kept of the smoothed loss, which is drawn only a few characters wide.
LOSS_POINTS = 1000


class RunningMean:
    """Exponential moving average with bias correction.

    With memory m, a value loses the factor m in weight with each later one. Dividing by the sum of the weights,
    1 - m^n, removes the bias towards zero of the first averages (Kingma and Ba 2015, section 3).
    """

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.value = 0.0
        self._weighted = 0.0
        self._weight = 0.0

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
    """

    def __init__(self, total_steps: int, start_step: int, rounds: Mapping[str, Rounds] | None = None) -> None:
        self.total_steps = total_steps
        self.start_step = start_step
        self.last: StepReport | None = None
        self.losses: list[float] = []
        self._rounds = rounds or {}
        self._round_seconds = {kind: each.seconds for kind, each in self._rounds.items()}
        self._within_step = 0.0
        self._loss_every = max(1, (total_steps - start_step) // LOSS_POINTS)
        self._loss = RunningMean(LOSS_MEMORY)
        self._seconds = RunningMean(PACE_MEMORY)
        self._data = RunningMean(PACE_MEMORY)
        self._weights = RunningMean(PACE_MEMORY)
        self._useful = RunningMean(PACE_MEMORY)
        self._spent = 0.0

    @classmethod
    def of(cls, running: StateChanged) -> Pace:
        """The pace of a starting session."""
        return cls(running.total_steps, running.step, running.rounds)

    def note(self, event: Event) -> None:
        """Use an event that carries a duration; ignore others."""
        match event:
            case StepReport():
                self._add(event)
            case PhaseEnded() if event.complete:
                self._round_seconds[event.phase.kind] = event.seconds
                if event.phase.kind == CACHING:  # a step that waits for new crops is not representative
                    self._within_step += event.seconds
            case CheckpointSaved():
                self._round_seconds[SAVING] = event.seconds

    def _add(self, step: StepReport) -> None:
        self.last = step
        self._spent += step.seconds
        caching, self._within_step = min(self._within_step, step.data_seconds), 0.0
        seconds = step.seconds - caching
        self._seconds.add(seconds)
        self._data.add(step.data_seconds - caching)
        self._weights.add(step.weights_seconds or 0.0)
        self._useful.add(seconds * (step.mfu or 0.0))
        smoothed = self._loss.add(step.loss)
        if self.steps_done % self._loss_every == 0:
            self.losses.append(smoothed)

    @property
    def loss(self) -> float:
        """Smoothed loss."""
        return self._loss.value

    @property
    def seconds_per_step(self) -> float:
        return self._seconds.value

    @property
    def steps_done(self) -> int:
        """Steps of this session."""
        return self.last.step - self.start_step if self.last else 0

    @property
    def step(self) -> int:
        """The last finished step of the run."""
        return self.last.step if self.last else self.start_step

    @property
    def is_complete(self) -> bool:
        return self.step >= self.total_steps

    @property
    def remaining_seconds(self) -> float:
        """Time until the run is finished: steps, and the previews, evaluations, saves and new crops between them."""
        steps = max(0, self.total_steps - self.step) * self._seconds.value
        return steps + sum(
            rounds.after(self.step, self.total_steps) * self._round_seconds[kind]
            for kind, rounds in self._rounds.items()
        )

    @property
    def shares(self) -> dict[str, float]:
        """How the recent steps spent their time."""
        streams = self.last is not None and self.last.weights_seconds is not None
        return shares(self._seconds.value, self._data.value, self._weights.value if streams else None)

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation of the recent steps, relative to the device's measured matmul rate, if known."""
        known = self.last is not None and self.last.mfu is not None and self._seconds.value > 0
        return self._useful.value / self._seconds.value if known else None

    @property
    def speed(self) -> str:
        """Where the time goes, in words."""
        return shares_text(self.shares) + (f", MFU {self.mfu * 100:.0f} %" if self.mfu is not None else "")

    def summary(self) -> str:
        """One sentence for the end of a session."""
        if self.last is None:
            if self.is_complete:
                return f"No step was needed: step {self.start_step} of {self.total_steps} was reached before."
            return f"No step was completed; the run stands at step {self.start_step} of {self.total_steps}."
        mean = self._spent / max(1, self.steps_done)
        return (
            f"Trained {amount(self.steps_done, 'steps')} in {clock(self._spent)} ({pace_text(mean)}), "
            f"step {self.last.step} of {self.total_steps}, smoothed loss {self.loss:.4f}."
        )


def clock(seconds: float) -> str:
    """`7.2 s`, `4:05` or `2:00:09`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def pace_text(seconds: float) -> str:
    """`1.92 s/step`, or `38 ms/step` for fast ones."""
    return f"{seconds:.2f} s/step" if seconds >= 0.1 else f"{seconds * 1000:.0f} ms/step"


def size_text(count: int) -> str:
    """Bytes in the largest unit that gives a number of at least 1: `11.4 GiB`."""
    power = max(0, min(4, (count.bit_length() - 1) // 10))
    size, unit = count / 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size:.0f} {unit}" if size >= 100 or power == 0 else f"{size:.1f} {unit}"


def amount(count: int, unit: str) -> str:
    """`1,204 captions`; just the number if there is no unit, and `done` if nothing was counted."""
    if not unit:
        return f"{count:,}" if count else "done"
    return f"{count:,} {unit.removesuffix('s') if count == 1 else unit}"


WORDED = {COMPUTE: "compute", WEIGHTS: "waiting for weights", DATA: "waiting for data"}


def shares_text(parts: dict[str, float]) -> str:
    """`compute 96 %, waiting for weights 3 %, waiting for data 1 %`"""
    return ", ".join(f"{WORDED[name]} {share * 100:.0f} %" for name, share in parts.items())


def line_of(event: CheckpointSaved | Evaluated | MediaRendered | PreviewGrew | Uploaded | Notice) -> str:
    """What a display prints about an event; empty if a bar shows it already."""
    match event:
        case CheckpointSaved():
            gone = f" (removed {', '.join(path.name for path in event.removed)})" if event.removed else ""
            return f"Saved {event.path.name}{gone}"
        case Evaluated():
            losses = ", ".join(f"{name.removeprefix(EVALUATED)} {loss:.5g}" for name, loss in event.losses.items())
            return f"Evaluation loss at step {event.step}: {losses}"
        case Uploaded():
            return f"Uploaded {event.name}: {event.url}"
        case Notice():
            return f"warning: {event.text}" if event.warning else event.text
        case MediaRendered() | PreviewGrew():
            return ""


def ending(event: PhaseEnded) -> str:
    """`1,204 captions in 4:05`, or `stopped at 12/40 pictures (30 %)`."""
    if event.complete:
        return f"{amount(event.done, event.phase.unit)} in {clock(event.seconds)}"
    return f"stopped at {reached(event.phase, event.done)}"


def reached(phase: PhaseStarted, done: int) -> str:
    """`12/40 pictures (30 %)`"""
    if not phase.total:
        return amount(done, phase.unit)
    return f"{done:,}/{amount(phase.total, phase.unit)} ({done * 100 // phase.total} %)"
