"""Everything that a run writes about itself while it goes: the record, its mirrors, the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from simpletuner.plan.build import Plan
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, MediaFile, MediaRecord, MetricsFile
from simpletuner.reporting.trackers import GuardedTracker, build_trackers
from simpletuner.run.report import RunReport
from simpletuner.training.state import TrainState


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
