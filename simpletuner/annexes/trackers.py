"""Logs a run to wandb and tensorboard.

A tracker never ends a run: its first failure is logged, and it is not called again. The local files
(`simpletuner` in `report_to`) are not a tracker; they are always written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from simpletuner.annexes.figures import still
from simpletuner.atomic import write_json
from simpletuner.config.json_reader import read_json
from simpletuner.config.trackers import tracker_names, wandb_mode, why_missing
from simpletuner.errors import Problems
from simpletuner.planning.lineage import WANDB_FILE
from simpletuner.planning.plans import Plan
from simpletuner.redaction import redact, redact_settings
from simpletuner.reporting import events
from simpletuner.reporting.events import ENDED, Event, EventStream, log_failure
from simpletuner.reporting.metrics import TIMESTEPS, MediaRecord
from simpletuner.reporting.step_figures import row_of
from simpletuner.run.companions import Companion

logger = logging.getLogger(__name__)

# Every update of the scatter plot sends all points again, so updates are rare and the number of
# points is limited.
TIMESTEPS_EVERY = 100
TIMESTEPS_KEPT = 5000


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker logs.

    Attributes:
        output_dir: base folder of preview paths; also holds the wandb run id.
        logging_dir: folder for trackers' files.
        start_step: step after which training continues; above 0, the same wandb run is resumed.
    """

    project: str
    name: str
    settings: Mapping[str, Any]
    output_dir: Path
    logging_dir: Path
    start_step: int = 0


class Tracker(Protocol):
    """Logs metrics and previews of the main process. `step` is the optimizer step."""

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log metrics, named as in the record; may be called several times per step."""

    def log_timesteps(self, timesteps: Sequence[float], step: int) -> None:
        """Log the timesteps at which the samples of a step were trained."""

    def log_media(self, media: Sequence[MediaRecord], step: int) -> None:
        """Log previews, whose files exist."""

    def finish(self, exit_code: int = 0) -> None:
        """Send the rest and close the run."""


@dataclass
class Trackers(Companion):
    """Companion that opens the available trackers in `report_to`."""

    events: EventStream

    def begin(self, plan: Plan, step: int) -> None:
        config = plan.config
        tracking = config.tracking
        run = TrackedRun(
            project=tracking.tracker_project_name,
            name=tracking.tracker_run_name,
            settings=config.flat,
            output_dir=plan.output_dir,
            logging_dir=Path(config.run.logging_dir).expanduser(),
            start_step=step,
        )
        for name, tracker in open_trackers(tracking.report_to, run):
            self.events.subscribe(name, TrackerEvents(tracker))


def open_trackers(report_to: str, run: TrackedRun) -> Iterator[tuple[str, Tracker]]:
    """Open the available trackers in `report_to`; returns them with their names.

    Secrets in settings are redacted.
    """
    names = tracker_names(report_to)
    takes_all = "all" in names
    run = replace(
        run,
        project=redact(run.project),
        name=redact(run.name),
        settings=redact_settings(run.settings),
    )
    for name, build in TRACKERS.items():
        if name not in names and not takes_all:
            continue
        reason = why_missing(name)
        if reason:
            logger.log(logging.INFO if takes_all else logging.WARNING, "report_to: %s", reason)
            continue
        try:
            tracker = build(run)
        except Exception as error:  # noqa: BLE001 - packages raise what they like, also when they are imported
            log_failure(name, error)
            continue
        yield name, tracker


class TrackerEvents:
    """Subscriber that passes the events of a run to a tracker, until the run ends."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._round: list[MediaRecord] = []  # previews of one round are sent together
        self._is_finished = False

    def __call__(self, event: Event) -> None:
        if self._is_finished:
            return
        tracker = self._tracker
        match event:
            case events.StepReport():
                row = row_of(event)
                metrics = {name: value for name, value in row.items() if name != TIMESTEPS}
                tracker.log(metrics, event.step)
                tracker.log_timesteps(event.timesteps, event.step)
            case events.Evaluated():
                tracker.log(event.losses, event.step)
            case events.MediaRendered():
                self._round.append(event.media)
            # One call per round: if a key is logged twice in a step, wandb keeps only the last
            # value.
            case events.PhaseEnded() if self._round:
                media = self._round
                self._round = []
                tracker.log_media(media, media[0].step)
            case events.StateChanged() if event.state in ENDED:
                self._is_finished = True
                tracker.finish(0 if event.state == "finished" else 1)


class WandbTracker:
    """Logs to a wandb run, which is continued when training resumes.

    Step 0 and a branch begin a new run.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # imported here because it takes a second

        self._wandb = wandb
        self._output_dir = run.output_dir
        self._timesteps: list[tuple[int, float]] = []
        self._sent_timesteps_at = run.start_step
        run.logging_dir.mkdir(parents=True, exist_ok=True)
        run_id = None
        if run.start_step:
            # Empty if the file is missing or damaged.
            earlier_run = read_json(run.output_dir / WANDB_FILE, Problems(), dict) or {}
            run_id = earlier_run.get("id")
        is_online = wandb_mode() == "online"
        self._run: Any = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id,
            # Offline there is no server to resume from, and wandb warns about the setting.
            resume="allow" if run_id and is_online else None,
            dir=str(run.logging_dir),
            config=dict(run.settings),
            # By default, wandb rejects changed settings of a resumed run.
            allow_val_change=True,
            # Console output and the command line are not sent: they may contain secrets such as a
            # webhook's URL.
            settings=wandb.Settings(
                console="off",
                quiet=True,
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                init_timeout=30.0,  # seconds that an unreachable server may delay the start
            ),
        )
        # Steps after the checkpoint were sent before the interruption; repeated steps have equal
        # values.
        self._first_step = self._run.starting_step
        run.output_dir.mkdir(parents=True, exist_ok=True)
        write_json(run.output_dir / WANDB_FILE, {"id": self._run.id})
        place = self._run.url if is_online else f"{wandb_mode()}, {self._run.dir}"
        logger.info("wandb: %s", place)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if step >= self._first_step:
            self._run.log(dict(metrics), step=step)

    def log_timesteps(self, timesteps: Sequence[float], step: int) -> None:
        self._timesteps += [(step, float(timestep)) for timestep in timesteps]
        if step - self._sent_timesteps_at >= TIMESTEPS_EVERY:
            self._send_timesteps(step)

    def log_media(self, media: Sequence[MediaRecord], step: int) -> None:
        groups: dict[str, list[Any]] = {}
        for record in media:
            path = str(self._output_dir / record.path)
            kind = self._wandb.Video if record.is_video else self._wandb.Image
            key = f"validation/{record.short_name}"
            if record.ema:
                key += "/ema"
            groups.setdefault(key, []).append(kind(path, caption=record.prompt))
        if groups and step >= self._first_step:
            self._run.log(groups, step=step)

    def finish(self, exit_code: int = 0) -> None:
        if self._timesteps:
            self._send_timesteps(max(self._timesteps)[0])
        self._run.finish(exit_code=exit_code)

    def _send_timesteps(self, step: int) -> None:
        self._timesteps = self._timesteps[-TIMESTEPS_KEPT:]
        self._sent_timesteps_at = step
        if step < self._first_step:
            return
        table = self._wandb.Table(
            columns=["global_step", "timestep"], data=[list(point) for point in self._timesteps]
        )
        chart = self._wandb.plot.scatter(
            table, "global_step", "timestep", title="Timesteps trained"
        )
        self._run.log({"timesteps_scatter": chart}, step=step)


class TensorboardTracker:
    """Writes tensorboard event files, one per session.

    Steps that this session repeats are hidden in older files.
    """

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._output_dir = run.output_dir
        folder = run.logging_dir / run.project / run.name
        # `purge_step` hides steps after the checkpoint, which this session logs again.
        self._writer: Any = SummaryWriter(str(folder), purge_step=run.start_step + 1)
        text = json.dumps(run.settings, indent=2, ensure_ascii=False, default=str)
        # Indented by four, so that Markdown shows it as code.
        self._writer.add_text("config", "    " + text.replace("\n", "\n    "), run.start_step)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def log_timesteps(self, timesteps: Sequence[float], step: int) -> None:
        self._writer.add_histogram("timesteps", np.asarray(timesteps, dtype=np.float64), step)

    def log_media(self, media: Sequence[MediaRecord], step: int) -> None:
        for record in media:
            tag = f"validation/{record.short_name}/{record.index}"
            if record.ema:
                tag += "/ema"
            path = self._output_dir / record.path
            self._writer.add_text(f"{tag}/prompt", record.prompt, step)
            # Tensorboard cannot show mp4: of a clip, its middle frame is logged.
            self._writer.add_image(tag, np.asarray(still(path)), step, dataformats="HWC")
        self._writer.flush()

    def finish(self, exit_code: int = 0) -> None:
        self._writer.close()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorboardTracker,
}
