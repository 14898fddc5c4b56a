"""Everything that a run writes about itself while it goes: the record, its mirrors, the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from simpletuner.data.sample import LedgerEntry
from simpletuner.plan.build import Plan
from simpletuner.reporting.environment import describe_environment
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    METRICS_FILE,
    MediaFile,
    MediaRecord,
    MetricsFile,
    read,
    read_media,
)
from simpletuner.reporting.report import REPORT_FILE, LedgerRow, ReportData, State, settings_of, write_report
from simpletuner.reporting.trackers import GuardedTracker, build_trackers
from simpletuner.training.state import TrainState


@dataclass
class RunReport:
    """Writes `training_report.html` for one plan."""

    plan: Plan
    _environment: dict[str, str] = field(default_factory=describe_environment, init=False)

    def write(self, step: int, state: State = "running", message: str = "") -> None:
        """Rewrite the report as of a step."""
        plan = self.plan
        folder = plan.output_dir
        data = ReportData(
            title=plan.config.tracking.tracker_run_name,
            subtitle=f"{_kind(plan)} on {plan.spec.name} {plan.flavour.name}",
            state=state,
            step=step,
            total_steps=plan.length.total_steps,
            output_dir=folder,
            metrics=read(folder / METRICS_FILE),
            previews=read_media(folder / MEDIA_FILE),
            settings=settings_of(plan.config),
            ledger=[_row(entry) for dataset in plan.datasets for entry in dataset.ledger()],
            environment=self._environment,
            message=message,
            notes=[str(warning) for warning in plan.warnings],
        )
        write_report(folder / REPORT_FILE, data)


def _kind(plan: Plan) -> str:
    return "LoRA" if plan.config.model.model_type == "lora" else "full fine-tune"


def _row(entry: LedgerEntry) -> LedgerRow:
    geometry = entry.geometry
    return LedgerRow(
        dataset=entry.dataset_id,
        file=entry.name,
        used=not entry.use,
        size="x".join(map(str, entry.original_size)) if entry.original_size else "",
        bucket=entry.trained_size,
        crop=f"left {geometry.crop[0]}, top {geometry.crop[1]}" if geometry else "",
        reason=entry.use,
    )


@dataclass(frozen=True)
class Records:
    """The files and services of one session."""

    metrics: MetricsFile
    media: MediaFile
    trackers: Sequence[GuardedTracker]
    report: RunReport

    def show(self, records: Sequence[MediaRecord]) -> None:
        """Pass on previews of one step, which are on disk by now."""
        if not records:
            return
        for record in records:
            self.media.append(record)
        for tracker in self.trackers:
            tracker.log_media(records, records[0].step)
        self.report.write(records[0].step)


@contextmanager
def keep_records(plan: Plan, state: TrainState) -> Iterator[Records]:
    """Open the records of a session that goes on from a state, and close them with how it ended."""
    config, folder, step = plan.config, plan.output_dir, state.global_step
    report = RunReport(plan)
    trackers = build_trackers(config.tracking, folder, Path(config.run.logging_dir).expanduser(), step)
    for tracker in trackers:
        tracker.start(config.flat())
    metrics, media = MetricsFile(folder / METRICS_FILE, step), MediaFile(folder / MEDIA_FILE, step)
    exit_code = 1
    try:
        yield Records(metrics, media, trackers, report)
        report.write(state.global_step, "finished")
        exit_code = 0
    except BaseException as error:
        report.write(state.global_step, "stopped", message=str(error) or type(error).__name__)
        raise
    finally:
        metrics.close()
        media.close()
        for tracker in trackers:
            tracker.finish(exit_code)
