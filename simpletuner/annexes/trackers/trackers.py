"""Mirrors of the run record in wandb and tensorboard, where people compare runs.

A tracker never ends a run: one that fails is logged once and not called again. The local files (`simpletuner` in
`report_to`) are not a tracker; they are always written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from simpletuner.config.trackers import PACKAGES, tracker_names, why_missing
from simpletuner.plan.build import Plan
from simpletuner.redaction import redact, redact_settings
from simpletuner.reporting import events as happened
from simpletuner.reporting.events import ENDED, Event, EventStream
from simpletuner.reporting.metrics import MediaRecord
from simpletuner.run.companions import Companion

logger = logging.getLogger(__name__)
Value = TypeVar("Value")


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker opens.

    Attributes:
        output_dir: paths of previews are relative to it; the wandb run id is kept there.
        logging_dir: where trackers put their own files.
        start_step: a resumed run continues after this step, under the same wandb run.
    """

    project: str
    name: str
    settings: Mapping[str, Any]
    output_dir: Path
    logging_dir: Path
    start_step: int = 0


class Tracker(Protocol):
    """Receives what the main process measures. `step` is the optimizer step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of a step; may be called several times for one step."""

    def log_timesteps(self, timesteps: Sequence[float], step: int) -> None:
        """The timesteps at which the samples of this step were trained."""

    def log_media(self, media: Sequence[MediaRecord], step: int) -> None:
        """Previews; their files exist."""

    def finish(self, exit_code: int = 0) -> None:
        """Send the rest and close the run."""


@dataclass
class Trackers(Companion):
    """Opens the trackers that `report_to` names and that can work here."""

    events: EventStream

    def begin(self, plan: Plan, step: int) -> None:
        config, tracking = plan.config, plan.config.tracking
        names, folder = (tracking.tracker_project_name, tracking.tracker_run_name), Path(config.run.logging_dir)
        run = TrackedRun(*names, config.flat(), plan.output_dir, folder.expanduser(), step)
        for tracker in open_trackers(tracking.report_to, run):
            self.events.subscribe(tracker)


def open_trackers(report_to: str, run: TrackedRun) -> Iterator[GuardedTracker]:
    """The trackers named that can work here; secrets in the settings are redacted."""
    names = tracker_names(report_to)
    settings = redact_settings(run.settings)
    run = replace(run, project=redact(run.project), name=redact(run.name), settings=settings)
    for name in PACKAGES:
        if name not in names and "all" not in names:
            continue
        if reason := why_missing(name):
            logger.log(logging.INFO if "all" in names else logging.WARNING, "report_to: %s", reason)
        else:
            yield GuardedTracker(name, lambda: open_tracker(name, run))  # noqa: B023 - called at once


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Importing a tracker takes a second, which only its users should wait for."""
    if name == "wandb":
        from simpletuner.annexes.trackers.wandb_tracker import WandbTracker

        return WandbTracker(run)
    from simpletuner.annexes.trackers.tensorboard_tracker import TensorboardTracker

    return TensorboardTracker(run)


class GuardedTracker:
    """Passes events to a tracker, and keeps the tracker's failures away from training.

    Args:
        name: for the log.
        build: opens the tracker; importing its package may fail too.
    """

    def __init__(self, name: str, build: Callable[[], Tracker]) -> None:
        self.name = name
        self._round: list[MediaRecord] = []  # previews of one round are sent together
        self._tracker = self._guard(build)

    def __call__(self, event: Event) -> None:
        if tracker := self._tracker:
            self._guard(lambda: self._pass_on(tracker, event))

    def _pass_on(self, tracker: Tracker, event: Event) -> None:
        match event:
            case happened.StepReport():
                tracker.log(event.metrics, event.step)
                tracker.log_timesteps(event.timesteps, event.step)
            case happened.Evaluated():
                tracker.log(event.losses, event.step)
            case happened.MediaRendered():
                self._round.append(event.media)
            case happened.PhaseEnded() if self._round:
                media, self._round = self._round, []
                tracker.log_media(media, media[0].step)
            case happened.StateChanged() if event.state in ENDED:
                tracker.finish(0 if event.state == "finished" else 1)
                self._tracker = None

    def _guard(self, call: Callable[[], Value]) -> Value | None:
        try:
            return call()
        except Exception as error:
            self._tracker = None
            first = "".join(f": {line}" for line in str(error).strip().splitlines()[:1])
            reason = redact(f"({type(error).__name__}{first})")
            logger.warning("%s stopped working; training goes on without it. %s", self.name, reason)
            logger.debug("%s failed", self.name, exc_info=True)
            return None
