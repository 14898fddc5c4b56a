"""Running averages of the steps, a notice when they become slower, and numbers worded for people."""

from __future__ import annotations

import time
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from statistics import median

from simpletuner.reporting import events
from simpletuner.reporting.metrics import COMPUTE, DATA, EVALUATED, WEIGHTS, shares

# The loss depends strongly on the noise level that was drawn; an average over some fifty steps shows the trend.
LOSS_MEMORY = 0.98
# The pace changes with the bucket, and the remaining time should follow it within some ten steps.
PACE_MEMORY = 0.9
# Points kept of the smoothed loss, which is drawn only a few characters wide.
LOSS_POINTS = 1000

# Factors of the usual pace. The lower limit ends an episode, so that a pace around the upper one is reported once.
SLOWER = 1.5
RECOVERED = 1.2
RECENT = 5  # steps whose median is compared; one slow step alone is no slowdown
ENOUGH = 20  # steps of a shape before its usual pace is known
# A gap between two steps of at least this many seconds and this many steps was a checkpoint, previews or an evaluation.
LEAST_PAUSE, PAUSE = 0.1, 0.5
AFTER_A_PAUSE = 2  # steps that are ignored after it

WHOLE = "whole"
REASONS = {
    COMPUTE: "computing takes longer, so another program may use the device, or heat or power slow its clock",
    WEIGHTS: "weights arrive later, so another program may use the host's memory or its bus to the device",
    DATA: "data arrives later, so the disk with the caches or the processor may be busy",
}


class RunningMean:
    """Exponential moving average with bias correction.

    With memory m, a value loses the factor m in weight with each later one. Dividing by the sum of the weights,
    1 - m^n, removes the bias towards zero of the first averages (Kingma and Ba 2015, section 3).
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
        loss: smoothed.
        step: the last finished one of the run.
    """

    def __init__(self, total_steps: int, start_step: int, rounds: Mapping[str, events.Rounds] | None = None) -> None:
        self.total_steps = total_steps
        self.start_step = self.step = start_step
        self.last: events.StepReport | None = None
        self.loss, self.losses = 0.0, list[float]()
        self._rounds = rounds or {}
        self._round_seconds = {kind: round_.seconds for kind, round_ in self._rounds.items()}
        self._within_step = self._spent = 0.0
        self._loss_every = max(1, (total_steps - start_step) // LOSS_POINTS)
        self._loss = RunningMean(LOSS_MEMORY)
        self._seconds, self._data, self._weights, self._useful = (RunningMean(PACE_MEMORY) for _ in range(4))

    @classmethod
    def of(cls, running: events.StateChanged) -> Pace:
        """The pace of a starting session."""
        return cls(running.total_steps, running.step, running.rounds)

    def note(self, event: events.Event) -> None:
        """Use an event that carries a duration; ignore others."""
        match event:
            case events.StepReport():
                self._add(event)
            case events.PhaseEnded() if event.complete:
                self._round_seconds[event.phase.kind] = event.seconds
                if event.phase.kind == events.CACHING:  # a step that waits for new crops is not representative
                    self._within_step += event.seconds
            case events.CheckpointSaved():
                self._round_seconds[events.SAVING] = event.seconds

    def _add(self, step: events.StepReport) -> None:
        self.last, self.step = step, step.step
        self._spent += step.seconds
        # The step waited for the encoder as for data: `remaining_seconds` counts that as a round, not as pace.
        caching, self._within_step = min(self._within_step, step.data_seconds), 0.0
        seconds = step.seconds - caching
        self._seconds.add(seconds)
        self._data.add(step.data_seconds - caching)
        self._weights.add(step.weights_seconds or 0.0)
        # MFU weighted by time: the mean of the ratios would overrate fast steps.
        self._useful.add(seconds * (step.mfu or 0.0))
        self.loss = self._loss.add(step.loss)
        if self.steps_done % self._loss_every == 0:
            self.losses.append(self.loss)

    @property
    def seconds_per_step(self) -> float:
        return self._seconds.value

    @property
    def steps_done(self) -> int:
        """Steps of this session."""
        return self.step - self.start_step

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
        density = None if self.last is None else self.last.density
        parts = {"MFU": self.mfu, "attention density": density}
        known = (f", {name} {share * 100:.0f} %" for name, share in parts.items() if share is not None)
        return shares_text(self.shares) + "".join(known)

    def summary(self) -> str:
        """One sentence for the end of a session."""
        if self.last is None:
            if self.is_complete:
                return f"No step was needed: step {self.start_step} of {self.total_steps} was reached before."
            return f"No step was completed; the run stands at step {self.start_step} of {self.total_steps}."
        mean = self._spent / max(1, self.steps_done)
        return (
            f"Trained {amount(self.steps_done, 'steps')} in {clock(self._spent)} ({pace_text(mean)}), "
            f"step {self.step} of {self.total_steps}, smoothed loss {self.loss:.4f}."
        )


@dataclass
class _ShapeHistory:
    """Durations of the steps of one shape, whole and by part: all of them sorted, and the latest in order of time."""

    ordered: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    recent: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    def add(self, parts: dict[str, float]) -> None:
        for name, value in parts.items():
            insort(self.ordered[name], value)
        self.recent.append(parts)

    def usual(self, part: str) -> float:
        """The upper median of all steps, without sorting them again as `statistics` would."""
        return self.ordered[part][len(self.ordered[part]) // 2]

    def lately(self, part: str) -> float:
        return median(parts[part] for parts in self.recent)

    def growth(self, part: str) -> float:
        """By how many seconds a part of a step grew."""
        return self.lately(part) - self.usual(part)


class SlowSteps:
    """Notices when steps become slower, and names the likely reason.

    Only steps of the same shape are compared, since a larger bucket is slower by design.

    Args:
        now: the clock, read once after each step; tests pass their own.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._histories: defaultdict[Hashable, _ShapeHistory] = defaultdict(_ShapeHistory)
        self._slow: set[Hashable] = set()
        self._ended: float | None = None
        self._skip = 0

    def add(self, report: events.StepReport) -> str | None:
        """Add a step; returns a notice when an episode of slow steps begins."""
        if self._follows_a_pause(report.seconds):
            return None
        # Techniques run further passes in some steps only: those are slower by design, like larger shapes.
        kind = report.shapes, report.passes
        waits = {WEIGHTS: report.weights_seconds or 0.0, DATA: report.data_seconds}
        parts = {COMPUTE: max(0.0, report.seconds - sum(waits.values())), **waits}
        history = self._histories[kind]
        history.add({WHOLE: sum(parts.values()), **parts})
        # Medians, which single slow steps do not move.
        recent, usual = history.lately(WHOLE), history.usual(WHOLE)
        slowdown = recent / usual if usual and len(history.ordered[WHOLE]) >= ENOUGH else 1.0
        if slowdown < RECOVERED:
            self._slow.discard(kind)
        if slowdown < SLOWER:
            return None
        # One notice an episode, however many shapes slow down in it.
        begins = not self._slow
        self._slow.add(kind)
        reason = REASONS[max(parts, key=history.growth)]
        said = f"{slowdown:.1f} times as long as usual ({pace_text(usual)}). Likely reason: {reason}."
        return (
            f"Steps became slower: the last {RECENT} of this shape took {pace_text(recent)}, {said}" if begins else None
        )

    def _follows_a_pause(self, seconds: float) -> bool:
        """Whether other work ran just before; its after-effects (cold allocator, moved weights) slow a step or two."""
        ended, self._ended = self._ended, self._now()
        if ended is not None and self._ended - ended - seconds > max(LEAST_PAUSE, PAUSE * seconds):
            self._skip = AFTER_A_PAUSE
        skipped = self._skip > 0
        self._skip = max(0, self._skip - 1)
        return skipped


def clock(seconds: float) -> str:
    """`7.2 s`, `4:05` or `2:00:09`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """A duration with at most two digits: estimates are no more precise."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    # Up to 100 of a unit: "90 min" says more than "2 h".
    for unit, size, end in (("s", 1, 100), ("min", 60, 6000), ("h", 3600, 360_000)):
        if seconds < end:
            return f"{seconds / size:.0f} {unit}"
    days = seconds / 86400
    return f"{days:.0f} days" if days < 1000 else f"{days / 365.25:.0f} years"


def pace_text(seconds: float) -> str:
    """`1.92 s/step`, or `0.038 s/step` for fast ones."""
    return f"{seconds:.{2 if seconds >= 0.1 else 3}f} s/step"


def size_text(count: int) -> str:
    """Bytes in the largest unit, of powers of 1000, that gives a number of at least 1: `11.4 GB`."""
    power = min(4, (len(str(count)) - 1) // 3)
    size, unit = count / 1000**power, ("B", "kB", "MB", "GB", "TB")[power]
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


def line_of(event: events.Event) -> str:
    """What a display prints about an event; empty if a bar shows it already."""
    match event:
        case events.CheckpointSaved():
            gone = f" (removed {', '.join(path.name for path in event.removed)})" if event.removed else ""
            return f"Saved {event.path.name}{gone}"
        case events.Evaluated():
            losses = (f"{name.removeprefix(EVALUATED)} {loss:.5g}" for name, loss in event.losses.items())
            return f"Evaluation loss at step {event.step}: {', '.join(losses)}"
        case events.Uploaded():
            return f"Uploaded {event.name}: {event.url}"
        case events.Notice():
            return f"warning: {event.text}" if event.warning else event.text
    return ""


def ending(event: events.PhaseEnded) -> str:
    """`1,204 captions in 4:05`, or `stopped at 12/40 pictures (30 %)`."""
    if event.complete:
        return f"{amount(event.done, event.phase.unit)} in {clock(event.seconds)}"
    return f"stopped at {reached(event.phase, event.done)}"


def reached(phase: events.PhaseStarted, done: int) -> str:
    """`12/40 pictures (30 %)`"""
    if not phase.total:
        return amount(done, phase.unit)
    return f"{done:,}/{amount(phase.total, phase.unit)} ({done * 100 // phase.total} %)"
