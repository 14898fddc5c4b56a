"""Everything that a run writes about itself while it goes: the record, its mirrors, the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from simpletuner.caching.fill import prepared_picture
from simpletuner.data.files import DeviceError, MediaError
from simpletuner.data.sample import LedgerEntry, Sample
from simpletuner.models.registry import load_adapter
from simpletuner.models.usage import Usage
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
from simpletuner.reporting.previews import TrainingSample, thumbnail
from simpletuner.reporting.report import REPORT_FILE, LedgerRow, ReportData, Result, State, settings_of, write_report
from simpletuner.reporting.trackers import GuardedTracker, build_trackers
from simpletuner.training.manifest import LORA_FILE, PIPELINE_FOLDER
from simpletuner.training.state import TrainState

# Training pictures that the report shows.
SAMPLES = 24
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "fp8": "bfloat16"}


@dataclass
class RunReport:
    """Writes `training_report.html` for one plan."""

    plan: Plan
    _environment: dict[str, str] = field(default_factory=describe_environment, init=False)

    @cached_property
    def samples(self) -> list[TrainingSample]:
        """Some of the training pictures, evenly chosen; decoded once a session."""
        return [
            _shown(sample) for sample in pick(SAMPLES, [each for data in self.plan.trained for each in data.samples])
        ]

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
            samples=self.samples,
            environment=self._environment,
            message=message,
            notes=[str(warning) for warning in plan.warnings],
            result=find_result(plan) if state == "finished" else None,
        )
        write_report(folder / REPORT_FILE, data)


def _kind(plan: Plan) -> str:
    return "LoRA" if plan.config.model.model_type == "lora" else "full fine-tune"


def find_result(plan: Plan) -> Result | None:
    """The published file or folder, with a program that uses it."""
    path = plan.output_dir / (LORA_FILE if plan.config.model.model_type == "lora" else PIPELINE_FOLDER)
    if not path.exists():
        return None
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return Result(path.name, sum(each.stat().st_size for each in files), snippet_for(plan))


def snippet_for(plan: Plan) -> str:
    """A program that samples what the newest preview of the main prompt shows; empty where ComfyUI is meant."""
    config, is_lora = plan.config, plan.config.model.model_type == "lora"
    if is_lora and config.lora.lora_format == "comfyui":
        return ""
    validation, base = config.validation, plan.source["transformer"].location
    usage = Usage(
        model=base if is_lora else str(plan.output_dir / PIPELINE_FOLDER),
        lora=str(plan.output_dir) if is_lora else None,
        task=plan.flavour.task,
        dtype=DTYPE_NAMES[config.precision.mixed_precision],
        prompt=plan.prompts[-1].prompt if plan.prompts else "",
        negative_prompt=validation.validation_negative_prompt or "",
        size=plan.sizes[0],
        frames=validation.validation_num_video_frames or 1,
        frame_rate=validation.framerate or plan.spec.frame_rate or 1,
        steps=validation.validation_num_inference_steps or 30,
        guidance=validation.validation_guidance or 1.0,
        seed=plan.seed if validation.validation_seed is None else validation.validation_seed,
        options=config.family,
        shift=config.flow.flow_schedule_shift if config.is_explicit("flow_schedule_shift") else None,
    )
    return load_adapter(plan.spec).usage_snippet(usage)


def pick(count: int, samples: Sequence[Sample]) -> list[Sample]:
    """At most so many samples, evenly spaced."""
    if len(samples) <= count:
        return list(samples)
    return [samples[index * len(samples) // count] for index in range(count)]


def _shown(sample: Sample) -> TrainingSample:
    """A sample as the report shows it; one that cannot be decoded any more stands without its picture."""
    partner = _thumbnail(sample.partner) if sample.partner else ""
    return TrainingSample(sample.full_name, _thumbnail(sample), sample.captions, sample.frames > 1, partner)


def _thumbnail(sample: Sample) -> str:
    try:
        return thumbnail(prepared_picture(sample))
    except (MediaError, DeviceError, OSError):
        return ""


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
