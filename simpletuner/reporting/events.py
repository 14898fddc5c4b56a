"""What happens in a run, as one stream of events. Free of torch.

Whoever encodes, trains, renders or saves publishes; the display, the record, the trackers and the report subscribe.
None of them changes anything in training, and none knows of the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from simpletuner.errors import Interrupted
from simpletuner.reporting.metrics import MediaRecord

RunState = Literal["starting", "running", "stopping", "finished", "failed", "interrupted"]
ENDED: frozenset[RunState] = frozenset({"finished", "failed", "interrupted"})
# Why a run failed or was interrupted is told by whoever started it.
SHOWN: frozenset[RunState] = frozenset({"starting", "stopping", "finished"})
# Kinds of phases that come again and again while a run trains.
CACHING, EVALUATION, PREVIEWS, SAVING = "caching", "evaluation", "previews", "saving"

EVALUATED = "loss/val/"  # begins the names of evaluation losses


@dataclass(frozen=True, eq=False)  # two phases may have one title
class PhaseStarted:
    """A piece of work beside the steps begins.

    Attributes:
        title: for people.
        total, unit: its size, None where it is not known, and what is counted (`captions`).
        kind: what its duration says something about: `caching`, `evaluation`, `previews`; empty for anything else.
    """

    title: str
    total: int | None = None
    unit: str = ""
    kind: str = ""


@dataclass(frozen=True)
class PhaseAdvanced:
    """`done` units are done; the note says what is being worked on (a file name)."""

    phase: PhaseStarted
    done: int
    note: str = ""


@dataclass(frozen=True)
class PhaseEnded:
    """A phase is over, `complete` unless an error or a stop request ended it."""

    phase: PhaseStarted
    done: int
    seconds: float
    complete: bool


@dataclass(frozen=True)
class StepDone:
    """Numbers of one finished optimizer step.

    Attributes:
        step: counted from 1, over all sessions of the run.
        epoch: counted from 1.
        metrics: losses, learning rate and gradient size by their logged names.
        seconds: wall time of the step, including the wait for data.
        data_wait_seconds: part of `seconds` in which the next batch was not ready.
        weights_wait_seconds: part of `seconds` in which streamed weights were not there; None when none are streamed.
        mfu: model FLOP utilisation, in units of the device's measured matmul rate; None where it is not known.
        memory_bytes: peak memory of the device, of this process on a CPU; None where it is not measured.
        epochs: planned epochs, None when steps decide.
        timesteps: at which the samples of this step were trained.
    """

    step: int
    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    data_wait_seconds: float = 0.0
    weights_wait_seconds: float | None = None
    mfu: float | None = None
    memory_bytes: int | None = None
    epochs: int | None = None
    timesteps: Sequence[float] = ()

    @property
    def loss(self) -> float:
        return self.metrics["train_loss"]

    @property
    def learning_rate(self) -> float:
        return self.metrics["learning_rate"]


@dataclass(frozen=True)
class Evaluated:
    """Losses on data that is not trained on, by their logged names. Comes before the `StepDone` of its step."""

    step: int
    losses: Mapping[str, float]


@dataclass(frozen=True)
class MediaRendered:
    """A preview is on disk."""

    media: MediaRecord


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is complete, and the `removed` older ones are gone."""

    path: Path
    step: int
    seconds: float
    removed: Sequence[Path] = ()


@dataclass(frozen=True)
class Notice:
    """A line for people; a `warning` is something to look into."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Rounds:
    """Work that comes again while a run trains.

    Attributes:
        every: steps from one round to the next, a fraction where epochs decide.
        seconds: that a round is expected to take, until one was measured.
        at_end: one more comes after the last step, if that is not the end of an interval.
    """

    every: float
    seconds: float = 0.0
    at_end: bool = False

    def after(self, step: int, total: int) -> int:
        """How many rounds are still to come after a step."""
        count = int(total / self.every + 1e-9) - int(step / self.every + 1e-9)
        return count + (self.at_end and step < total and total % self.every > 1e-9)


@dataclass(frozen=True)
class StateChanged:
    """The run as a whole.

    Attributes:
        step, total_steps: where it is and where it will end.
        message: why it stopped, or what it has made; lines for people.
        rounds: what comes again and again, by the kind of its phases; given with `running`.
    """

    state: RunState
    step: int
    total_steps: int
    message: str = ""
    rounds: Mapping[str, Rounds] = field(default_factory=dict)


Event = (
    PhaseStarted | PhaseAdvanced | PhaseEnded | StepDone | Evaluated | MediaRendered | CheckpointSaved | Notice
    | StateChanged
)  # fmt: skip
Subscriber = Callable[[Event], None]


@dataclass
class StopRequest:
    """Whether somebody asked the run to stop after the step under way."""

    requested: bool = False

    def check(self) -> None:
        """Leave work that may be cut short.

        Raises:
            Interrupted: a stop was requested.
        """
        if self.requested:
            raise Interrupted("A stop was requested.")


class EventStream:
    """Hands every event to every subscriber, in order, from any thread.

    Attributes:
        stop: checked wherever a phase begins or advances, so that phases end early.
    """

    def __init__(self, *subscribers: Subscriber) -> None:
        self._subscribers = list(subscribers)
        self._lock = threading.RLock()
        self.stop = StopRequest()

    def subscribe(self, subscriber: Subscriber) -> None:
        """From now on."""
        self._subscribers.append(subscriber)

    def publish(self, event: Event) -> None:
        """Tell everybody."""
        with self._lock:
            for subscriber in self._subscribers:
                subscriber(event)

    def say(self, text: str) -> None:
        """A line for people."""
        self.publish(Notice(text))

    @contextmanager
    def phase(self, title: str, total: int | None = None, unit: str = "", kind: str = "") -> Iterator[RunningPhase]:
        """Work that takes a while; its end, and how it ended, is told when the block ends.

        Raises:
            Interrupted: the run was asked to stop.
        """
        self.stop.check()
        running = RunningPhase(self, PhaseStarted(title, total, unit, kind))
        self.publish(running.phase)
        started, complete = time.monotonic(), False
        try:
            yield running
            complete = True
        finally:
            self.publish(PhaseEnded(running.phase, running.done, time.monotonic() - started, complete))


class RunningPhase:
    """A piece of work of known or unknown size, under way."""

    def __init__(self, stream: EventStream, phase: PhaseStarted) -> None:
        self._stream, self.phase, self.done = stream, phase, 0

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more units are done; the note says what is being worked on (a file name).

        Raises:
            Interrupted: the run was asked to stop.
        """
        self.done += count
        self._stream.publish(PhaseAdvanced(self.phase, self.done, note))
        self._stream.stop.check()
