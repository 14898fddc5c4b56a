"""What happens in a run, as one stream of events. Free of torch.

Encoding, training, rendering and saving publish; the display, the record, the trackers and the report subscribe.
Subscribers do not change training and do not know each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from simpletuner.distributed.requests import Stop
from simpletuner.redaction import redact
from simpletuner.reporting.metrics import TIMESTEPS, MediaRecord, Value, shares

RunState = Literal["starting", "running", "stopping", "finished", "failed", "interrupted"]
ENDED: frozenset[RunState] = frozenset({"finished", "failed", "interrupted"})
# States whose message a display shows. The command line reports why a run failed or was interrupted.
SHOWN: frozenset[RunState] = frozenset({"starting", "stopping", "finished"})
# Kinds of phases that recur during training.
CACHING, EVALUATION, PREVIEWS, SAVING, UPLOADING = "caching", "evaluation", "previews", "saving", "uploading"


class Event:
    """Something that happened in a run."""


@dataclass(frozen=True, eq=False)  # compared by identity: two phases may have the same title
class PhaseStarted(Event):
    """Work outside the training steps begins.

    Attributes:
        title: for people.
        total, unit: its size (None if unknown), and what is counted (`captions`).
        kind: of a recurring phase, whose duration predicts the next: `caching`, `evaluation`, `previews`; else empty.
        stage: name for programs (`init_vae_cache`), the same in every run.
    """

    title: str
    total: int | None = None
    unit: str = ""
    kind: str = ""
    stage: str = ""


@dataclass(frozen=True)
class PhaseAdvanced(Event):
    """`done` units are done; the note names the current one (a file name)."""

    phase: PhaseStarted
    done: int
    note: str = ""


@dataclass(frozen=True)
class PhaseEnded(Event):
    """A phase has ended; `complete` is false if an error or a stop request cut it short."""

    phase: PhaseStarted
    done: int
    seconds: float
    complete: bool


@dataclass(frozen=True)
class StepReport(Event):
    """One finished optimizer step, for callbacks and subscribers. `Recorder` adds what the step does not know.

    Attributes:
        step: counted from 1, over all sessions of the run.
        epoch: of its last sample, counted from 1.
        metrics: losses, learning rate and gradient size by their logged names.
        seconds: wall time of the step, including the wait for data.
        data_seconds: part of `seconds` in which the next batch was not ready.
        weights_seconds: part of `seconds` spent waiting for streamed weights; None if none are streamed.
        timesteps: of the samples of this step.
        epochs_done: epochs completed by the end of this step.
        flops: model FLOPs of these samples; None if the family's cost is unknown.
        shapes: latent shape of each micro-batch, smallest first.
        passes: forward passes, with those of techniques; steps of equal shapes and passes take comparable time.
        densities: share of the pairs of tiles that block-sparse attention visited, by tokens of a sample.
        mfu: model FLOP utilisation, relative to the device's measured matmul rate; None if unknown.
        memory_bytes: peak memory of the device, on a CPU of this process; None if not measured.
        reserved_bytes: peak of what torch's allocator held of a GPU, fragments included.
        epochs: planned epochs; None if the run is counted in steps.
    """

    step: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    data_seconds: float = 0.0
    weights_seconds: float | None = None
    timesteps: Sequence[float] = ()
    epochs_done: int = 0
    flops: float | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    passes: int = 0
    densities: Mapping[int, float] = field(default_factory=dict)
    mfu: float | None = None
    memory_bytes: int | None = None
    reserved_bytes: int | None = None
    epochs: int | None = None

    @property
    def row(self) -> dict[str, Value]:
        """The line of this step in the record."""
        times = {"seconds": self.seconds, "data_seconds": self.data_seconds, "weights_seconds": self.weights_seconds}
        parts = shares(self.seconds, self.data_seconds, self.weights_seconds)
        timing = times | {"mfu": self.mfu} | {f"{name}_share": share for name, share in parts.items()}
        peaks = {"peak_memory_gb": self.memory_bytes, "reserved_memory_gb": self.reserved_bytes}
        return {
            **self.metrics,
            # Microseconds, and megabytes below: further digits would be noise.
            **{name: round(value, 6) for name, value in timing.items() if value is not None},
            **{name: round(size / 1e9, 3) for name, size in peaks.items() if size is not None},
            **({} if self.density is None else {"attention_density": round(self.density, 4)}),
            TIMESTEPS: [round(each, 1) for each in self.timesteps],
        }

    @property
    def density(self) -> float | None:
        """Share of the tiles that block-sparse attention visited; None for dense attention."""
        return fmean(self.densities.values()) if self.densities else None

    @property
    def loss(self) -> float:
        return self.metrics["train_loss"]

    @property
    def learning_rate(self) -> float:
        return self.metrics["learning_rate"]


@dataclass(frozen=True)
class Evaluated(Event):
    """Losses on held-out data, by their logged names. Published before the `StepReport` of its step."""

    step: int
    losses: Mapping[str, float]


@dataclass(frozen=True)
class MediaRendered(Event):
    """A preview is on disk."""

    media: MediaRecord


@dataclass(frozen=True)
class PreviewGrew(Event):
    """A picture of an unfinished preview is on disk; `media.path` names it.

    `done` of `total` sampling steps are done, and `timestep` is that of the last one.
    """

    media: MediaRecord
    done: int
    total: int
    timestep: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is complete, and the `removed` older ones are gone."""

    path: Path
    step: int
    seconds: float
    removed: Sequence[Path] = ()


@dataclass(frozen=True)
class Uploaded(Event):
    """An upload is complete.

    Attributes:
        name: of what was uploaded to where, for people.
        url: where it is.
    """

    name: str
    url: str
    step: int


@dataclass(frozen=True)
class Notice(Event):
    """A line for people; a `warning` deserves attention, an `urgent` one before anything else."""

    text: str
    warning: bool = False
    urgent: bool = False


@dataclass(frozen=True)
class Rounds:
    """Work that recurs during training.

    Attributes:
        every: steps between two rounds; not a whole number if epochs decide.
        seconds: expected duration of a round, used until one was measured.
        at_end: there is one more after the last step, unless an interval ends there.
    """

    every: float
    seconds: float = 0.0
    at_end: bool = False

    def after(self, step: int, total: int) -> int:
        """Number of rounds still to come after a step."""
        # The small term absorbs the rounding of fractions, so that a round at exactly `total` counts.
        count = int(total / self.every + 1e-9) - int(step / self.every + 1e-9)
        return count + (self.at_end and step < total and total % self.every > 1e-9)


@dataclass(frozen=True)
class StateChanged(Event):
    """The run as a whole.

    Attributes:
        step, total_steps: the last finished step, and the planned number of steps.
        message: why it stopped, or what it produced; lines for people.
        rounds: recurring work by the kind of its phases; given with `running`.
    """

    state: RunState
    step: int
    total_steps: int
    message: str = ""
    rounds: Mapping[str, Rounds] = field(default_factory=dict)


Subscriber = Callable[[Event], None]


class EventStream:
    """Passes every event to every subscriber, in order; thread-safe.

    Attributes:
        stop: checked whenever a phase begins or advances, so that it can end early.
        step: the last one that an event named.
    """

    def __init__(self, *subscribers: Subscriber, stop: Stop | None = None) -> None:
        self._subscribers = list(subscribers)
        self._lock = threading.RLock()  # reentrant: a subscriber may publish
        self.stop = stop or Stop()
        self.step = 0

    def subscribe(self, subscriber: Subscriber) -> None:
        """Pass all further events to the subscriber as well."""
        self._subscribers.append(subscriber)

    def publish(self, event: Event) -> None:
        """Pass an event to all subscribers."""
        # Held during the calls: all subscribers see one order, and none needs a lock of its own.
        with self._lock:
            if isinstance(event, StepReport | StateChanged):
                self.step = event.step
            for subscriber in self._subscribers:
                subscriber(event)

    def say(self, text: str, *, warning: bool = False, urgent: bool = False) -> None:
        """Publish a line for people, without secrets; see `Notice`."""
        self.publish(Notice(redact(text), warning, urgent))

    @contextmanager
    def phase(
        self, title: str, total: int | None = None, unit: str = "", kind: str = "", *, stage: str = ""
    ) -> Iterator[RunningPhase]:
        """Publish the start of a phase, and its end when the block is left.

        Raises:
            Interrupted: the run was asked to stop.
        """
        self.stop.check()
        running = RunningPhase(self, PhaseStarted(title, total, unit, kind, stage))
        self.publish(running.phase)
        started, complete = time.monotonic(), False
        try:
            yield running
            complete = True
        finally:
            self.publish(PhaseEnded(running.phase, running.done, time.monotonic() - started, complete))


class RunningPhase:
    """A phase in progress."""

    def __init__(self, stream: EventStream, phase: PhaseStarted) -> None:
        self._stream, self.phase, self.done = stream, phase, 0

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more units are done; the note names the current one (a file name).

        Raises:
            Interrupted: the run was asked to stop.
        """
        self.done += count
        # Published before it may raise: these units are done.
        self._stream.publish(PhaseAdvanced(self.phase, self.done, note))
        self._stream.stop.check()
