"""What a run writes about itself: the record, the trackers, the report.

All of them subscribe to the run's events and close themselves when the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from simpletuner.annexes.trackers.trackers import build_trackers
from simpletuner.caching.fill import prepared_picture
from simpletuner.data.dataset import ledger_rows
from simpletuner.data.files import DeviceError, MediaError
from simpletuner.data.sample import Sample
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from simpletuner.plan.build import Plan
from simpletuner.redaction import redact
from simpletuner.reporting.environment import describe_environment
from simpletuner.reporting.events import (
    ENDED,
    EVALUATED,
    PREVIEWS,
    Evaluated,
    Event,
    EventStream,
    MediaRendered,
    PhaseEnded,
    PhaseStarted,
    StateChanged,
    StepReport,
)
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    METRICS_FILE,
    Columns,
    MediaFile,
    MediaRecord,
    MetricsFile,
    read_media,
    read_rows,
)
from simpletuner.reporting.previews import TrainingSample, pick, thumbnail
from simpletuner.reporting.report import (
    LEDGER_ROWS,
    REPORT_FILE,
    ReportData,
    State,
    settings_of,
    write_report,
)
from simpletuner.run.publish import find_result

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recorded:
    """What the record has of the step that a session resumes from.

    Attributes:
        evaluated: whether it has its evaluation loss.
        previews: its previews.
    """

    evaluated: bool
    previews: list[MediaRecord]


class RunRecord:
    """Writes `training_metrics.jsonl` and `validation_media.jsonl`.

    Args:
        step: from which the session resumes; records of later steps are dropped.

    Attributes:
        recorded: what there is of that step.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._metrics, self._media = MetricsFile(folder / METRICS_FILE, step), MediaFile(folder / MEDIA_FILE, step)
        here = [row for row in read_rows(folder / METRICS_FILE) if row["step"] == step]
        previews = [record for record in read_media(folder / MEDIA_FILE) if record.step == step]
        self.recorded = Recorded(any(name.startswith(EVALUATED) for row in here for name in row), previews)
        self._step = step
        self._losses: Mapping[str, float] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case Evaluated() if event.step > self._step:
                self._losses = event.losses
            case Evaluated():  # on resume, for a step that was recorded without its evaluation
                self._metrics.append(event.step, event.losses)
            case StepReport():
                self._metrics.append(event.step, {**event.row, **self._losses})
                self._step, self._losses = event.step, {}
            case MediaRendered():
                self._media.append(event.media)
            case StateChanged() if event.state in ENDED:
                self._metrics.close()
                self._media.close()


# How many training pictures the report shows.
SAMPLES = 24


@dataclass
class RunReport:
    """Rewrites `training_report.html` at intervals, after new previews, and at the end.

    A report that cannot be written causes one warning and does not end the run, since it can be made from the record.
    """

    plan: Plan
    _environment: dict[str, str] = field(default_factory=describe_environment, init=False)
    _failed: bool = field(default=False, init=False)
    _step: int = field(default=0, init=False)

    @cached_property
    def samples(self) -> list[TrainingSample]:
        """Some training pictures, evenly spaced; decoded once a session."""
        return [
            _shown(sample) for sample in pick(SAMPLES, [each for data in self.plan.trained for each in data.samples])
        ]

    def __call__(self, event: Event) -> None:
        match event:
            case StepReport():
                self._step = event.step
                # Every rewrite renders the whole page, so there are about 20 of them in a long run.
                if event.step % max(50, self.plan.length.total_steps // 20) == 0:
                    self.write()
            case PhaseEnded() if event.phase.kind == PREVIEWS:
                self.write()
            case PhaseStarted(kind="uploading") if self._step == self.plan.length.total_steps:
                self.write("finished")  # so that a copy of the output folder has the whole report
            case StateChanged(state="running"):
                self._step = event.step
                self.write()
            case StateChanged(state="finished"):
                self._step = event.step
                self.write("finished")
            case StateChanged() if event.state in ENDED:
                self.write("stopped", event.message)

    def write(self, state: State = "running", message: str = "") -> None:
        """Rewrite the report as of the last step."""
        try:
            write_report(self.plan.output_dir / REPORT_FILE, self._data(state, message))
        except (OSError, UserError) as error:
            if not self._failed:
                logger.warning("The report cannot be written, and the run goes on without it. %s", error)
            self._failed = True

    def _data(self, state: State, message: str) -> ReportData:
        plan, folder = self.plan, self.plan.output_dir
        kind = plan.config.lora.kind if plan.config.model.model_type == "lora" else "full fine-tune"
        return ReportData(
            title=redact(plan.config.tracking.tracker_run_name),
            subtitle=f"{kind} on {plan.spec.name} {plan.flavour.name}",
            state=state,
            step=self._step,
            total_steps=plan.length.total_steps,
            output_dir=folder,
            metrics=Columns.of(read_rows(folder / METRICS_FILE)),
            previews=read_media(folder / MEDIA_FILE),
            settings=settings_of(plan.config),
            datasets=[
                (each.id, len(each.samples) + len(each.rejected), len(each.samples), sorted(each.sizes()))
                for each in plan.datasets
            ],
            ledger=ledger_rows(plan.datasets, LEDGER_ROWS),
            samples=self.samples,
            environment=self._environment,
            message=redact(message),
            notes=[redact(str(warning)) for warning in plan.warnings],
            result=find_result(plan, self._step) if state == "finished" else None,
        )


def _shown(sample: Sample) -> TrainingSample:
    """A sample as the report shows it, without its picture if that can no longer be decoded."""
    partner = _thumbnail(sample.partner) if sample.partner else ""
    return TrainingSample(sample.full_name, _thumbnail(sample), sample.captions, sample.frames > 1, partner)


def _thumbnail(sample: Sample) -> str:
    try:
        return thumbnail(prepared_picture(sample))
    except (MediaError, DeviceError, OSError):
        return ""


def keep_records(plan: Plan, events: EventStream, step: int, world: World) -> Recorded:
    """Keep the records of a session that resumes from a step, in the main process."""
    return world.on_main(lambda: _subscribe(plan, events, step))


def _subscribe(plan: Plan, events: EventStream, step: int) -> Recorded:
    """Subscribe the record, the trackers and the report.

    Raises:
        UserError: the record cannot be written.
    """
    config, folder = plan.config, plan.output_dir
    trackers = build_trackers(config.tracking, folder, Path(config.run.logging_dir).expanduser(), step)
    record = RunRecord(folder, step)
    events.subscribe(record)
    for tracker in trackers:
        tracker.start(config.flat())
        events.subscribe(tracker)
    events.subscribe(RunReport(plan))
    return record.recorded
