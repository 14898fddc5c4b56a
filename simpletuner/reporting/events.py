"""The events of a run, and the stream that delivers them to subscribers.

Encoding, training, rendering and saving publish events; the display, the record, the trackers and
the report subscribe. Subscribers are independent of each other and of training: one that raises is
named in the log and gets no more events.
"""

from __future__ import annotations

import logging
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
from simpletuner.reporting.intervals import Rounds
from simpletuner.reporting.metrics import MediaRecord

logger = logging.getLogger(__name__)

RunState = Literal["starting", "running", "stopping", "finished", "failed", "interrupted"]
ENDED: frozenset[RunState] = frozenset({"finished", "failed", "interrupted"})
# States whose message a display shows. The command line reports failures and interruptions.
SHOWN: frozenset[RunState] = frozenset({"starting", "stopping", "finished"})
# Kinds of phases that recur during training.
CACHING = "caching"
EVALUATION = "evaluation"
PREVIEWS = "previews"
SAVING = "saving"
UPLOADING = "uploading"


class Event:
    """Base class of all events."""


@dataclass(frozen=True, eq=False)  # compared by identity, since two phases may have the same title
class PhaseStarted(Event):
    """Work outside of training steps has started.

    Attributes:
        title: title for users.
        total, unit: amount of work (None if unknown) and its unit (`captions`).
        kind: kind of a recurring phase, whose duration predicts the next: `caching`, `evaluation`,
            `previews`; or empty.
        stage: machine-readable name (`init_vae_cache`), the same in every run.
    """

    title: str
    total: int | None = None
    unit: str = ""
    kind: str = ""
    stage: str = ""


@dataclass(frozen=True)
class PhaseAdvanced(Event):
    """`done` units are done; `note` names the current unit (a file name)."""

    phase: PhaseStarted
    done: int
    note: str = ""


@dataclass(frozen=True)
class PhaseEnded(Event):
    """A phase has ended; `complete` is false if an error or a stop request interrupted it."""

    phase: PhaseStarted
    done: int
    seconds: float
    complete: bool


@dataclass(frozen=True)
class StepReport(Event):
    """One finished optimizer step, for callbacks and subscribers.

    `Recorder` fills in fields that the step lacks.

    Attributes:
        step: step number, counted from 1, across all sessions of the run.
        epoch: epoch of its last sample, counted from 1.
        metrics: losses, learning rate and gradient magnitude, by logged name.
        seconds: wall time of the step, including the wait for data.
        data_seconds: part of `seconds` spent waiting for the next batch.
        weights_seconds: part of `seconds` spent waiting for streamed weights; None without
            streaming.
        timesteps: timesteps of the samples of this step.
        epochs_done: epochs completed by the end of this step.
        flops: model FLOPs of these samples; None if the family's cost is unknown.
        shapes: latent shape of each micro-batch, smallest first.
        passes: forward passes, including those of techniques; steps of equal shapes and passes are
            comparable.
        densities: share of tile pairs visited by block-sparse attention, by tokens of a sample.
        mfu: model FLOP utilisation, relative to the device's measured matmul rate; None if unknown.
        memory_bytes: peak memory of the device, or of this process on a CPU; None if not measured.
        reserved_bytes: peak memory reserved by torch's CUDA allocator, including fragmentation.
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
    def density(self) -> float | None:
        """Share of tiles visited by block-sparse attention; None for dense attention."""
        return fmean(self.densities.values()) if self.densities else None

    @property
    def loss(self) -> float:
        return self.metrics["train_loss"]

    @property
    def learning_rate(self) -> float:
        return self.metrics["learning_rate"]


@dataclass(frozen=True)
class Evaluated(Event):
    """Losses on held-out data, by logged name. Published before the `StepReport` of the step."""

    step: int
    losses: Mapping[str, float]


@dataclass(frozen=True)
class MediaRendered(Event):
    """A preview is on disk."""

    media: MediaRecord


@dataclass(frozen=True)
class PreviewGrew(Event):
    """A sketch of an unfinished preview is on disk, at `media.path`.

    `done` of `total` sampling steps are done; `timestep` is the timestep of the last one.
    """

    media: MediaRecord
    done: int
    total: int
    timestep: float


@dataclass(frozen=True)
class CheckpointSaved(Event):
    """A checkpoint is complete, and the older checkpoints in `removed` have been deleted."""

    path: Path
    step: int
    seconds: float
    removed: Sequence[Path] = ()


@dataclass(frozen=True)
class Uploaded(Event):
    """An upload is complete.

    Attributes:
        name: what was uploaded and where, as text for users.
        url: address of the upload.
    """

    name: str
    url: str
    step: int


@dataclass(frozen=True)
class Notice(Event):
    """A line for users; a `warning` needs attention, an `urgent` one immediately."""

    text: str
    warning: bool = False
    urgent: bool = False


@dataclass(frozen=True)
class StateChanged(Event):
    """The run has entered another state.

    Attributes:
        step, total_steps: the last finished step, and the planned number of steps.
        message: why the run stopped, or its result, as lines for users.
        rounds: recurring work by the kind of its phases; set for `running`.
        step_seconds: expected duration of a step, until one has been measured; set for `running`.
    """

    state: RunState
    step: int
    total_steps: int
    message: str = ""
    rounds: Mapping[str, Rounds] = field(default_factory=dict)
    step_seconds: float = 0.0


Subscriber = Callable[[Event], None]
Errors = type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True, eq=False)
class Subscription:
    """A subscriber of a stream.

    Attributes:
        name: its name in the log.
        ends_run: errors that reach the code that publishes an event.
    """

    name: str
    subscriber: Subscriber
    ends_run: Errors


class EventStream:
    """Delivers every event to every subscriber, in order; thread-safe.

    Args:
        required: the first subscribers, all of whose errors reach the code that publishes an event.

    Attributes:
        stop: checked whenever a phase starts or advances, so that it can end early.
        step: step of the last event with a step.
    """

    def __init__(self, *required: Subscriber, stop: Stop | None = None) -> None:
        self._subscriptions = [Subscription("", subscriber, Exception) for subscriber in required]
        self._lock = threading.RLock()  # reentrant: a subscriber may publish
        self.stop = stop or Stop()
        self.step = 0

    def subscribe(self, name: str, subscriber: Subscriber, *, ends_run: Errors = ()) -> None:
        """Deliver all further events to a subscriber too, until it raises an error.

        Args:
            name: the subject of the line in the log that reports its error.
            ends_run: errors that end the run instead, such as a full disk for the record.
        """
        self._subscriptions.append(Subscription(name, subscriber, ends_run))

    def publish(self, event: Event) -> None:
        """Deliver an event to all subscribers.

        Raises:
            Exception: an error of a subscriber that ends the run.
        """
        # Held during the calls, so that all subscribers see the same order and need no locks.
        with self._lock:
            if isinstance(event, StepReport | StateChanged):
                self.step = event.step
            for subscription in list(self._subscriptions):
                self._deliver(subscription, event)

    def _deliver(self, subscription: Subscription, event: Event) -> None:
        try:
            subscription.subscriber(event)
        except subscription.ends_run:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the others and the run go on
            # It may be gone already, if it has published another event and failed at that.
            if subscription in self._subscriptions:
                self._subscriptions.remove(subscription)
                log_failure(subscription.name, error)

    def notify(self, text: str, *, warning: bool = False, urgent: bool = False) -> None:
        """Publish a line for users, with secrets hidden; see `Notice`."""
        self.publish(Notice(redact(text), warning, urgent))

    @contextmanager
    def phase(
        self,
        title: str,
        total: int | None = None,
        unit: str = "",
        kind: str = "",
        *,
        stage: str = "",
    ) -> Iterator[RunningPhase]:
        """A context that publishes the start and the end of a phase.

        Raises:
            Interrupted: the run was asked to stop.
        """
        self.stop.check()
        running = RunningPhase(self, PhaseStarted(title, total, unit, kind, stage))
        self.publish(running.phase)
        started = time.monotonic()
        complete = False
        try:
            yield running
            complete = True
        finally:
            seconds = time.monotonic() - started
            self.publish(PhaseEnded(running.phase, running.done, seconds, complete))


def log_failure(name: str, error: Exception) -> None:
    """Log that a subscriber gets no more events, and why; the traceback goes to debug.log."""
    reason = type(error).__name__
    lines = str(error).strip().splitlines()
    if lines:
        reason += f": {lines[0]}"
    logger.warning(
        "%s stopped working; training continues without it. %s", name, redact(f"({reason})")
    )
    logger.debug("%s failed", name, exc_info=error)


class RunningPhase:
    """A phase in progress."""

    def __init__(self, stream: EventStream, phase: PhaseStarted) -> None:
        self._stream = stream
        self.phase = phase
        self.done = 0

    def advance(self, count: int = 1, note: str = "") -> None:
        """Report `count` more finished units; `note` names the current unit (a file name).

        Raises:
            Interrupted: the run was asked to stop.
        """
        self.done += count
        # Published before a possible raise, since these units are done.
        self._stream.publish(PhaseAdvanced(self.phase, self.done, note))
        self._stream.stop.check()
