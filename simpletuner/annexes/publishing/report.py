"""The report of a run, and what it says about the result."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from simpletuner.caching.fill import prepared_picture
from simpletuner.data.dataset import ledger_rows
from simpletuner.data.files import DeviceError, MediaError
from simpletuner.data.sample import Sample
from simpletuner.errors import UserError
from simpletuner.headers import METADATA, read_header
from simpletuner.models.registry import load_adapter
from simpletuner.models.usage import Usage
from simpletuner.plan.build import Plan
from simpletuner.redaction import redact
from simpletuner.reporting.environment import describe_environment
from simpletuner.reporting.events import (
    ENDED,
    PREVIEWS,
    Event,
    EventStream,
    PhaseEnded,
    PhaseStarted,
    StateChanged,
    StepReport,
)
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, Columns, read_media, read_rows
from simpletuner.reporting.previews import TrainingSample, evenly_spaced, thumbnail
from simpletuner.reporting.report import LEDGER_ROWS, REPORT_FILE, ReportData, Result, State, settings_of, write_report
from simpletuner.run.companions import Companion, Ledger
from simpletuner.training.manifest import LORA_FILE, PIPELINE_FOLDER, describe_errors, result_step

logger = logging.getLogger(__name__)

SAMPLES = 24  # training pictures in the report
DTYPE_NAMES = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "fp8": "bfloat16"}


@dataclass
class RunReport(Companion):
    """Rewrites `training_report.html` at intervals, after new previews, and at the end.

    A report that cannot be written causes one warning and does not end the run, since it can be made from the record.
    """

    events: EventStream
    plan: Plan = field(init=False)
    _environment: dict[str, str] = field(default_factory=dict, init=False)
    _failed: bool = field(default=False, init=False)
    _step: int = field(default=0, init=False)

    def begin(self, plan: Plan, step: int) -> None:
        self.plan, self._environment = plan, describe_environment()
        self.events.subscribe(self)

    def finish(self, ledger: Ledger) -> Sequence[str]:
        return [f"Report: {self.plan.output_dir / REPORT_FILE}"]

    @cached_property
    def samples(self) -> list[TrainingSample]:
        """Some training pictures, evenly spaced; decoded once a session."""
        samples = [sample for data in self.plan.trained for sample in data.samples]
        return [
            TrainingSample(
                name=sample.full_name,
                source=_thumbnail(sample),
                captions=sample.captions,
                is_clip=sample.frames > 1,
                edited_from=_thumbnail(sample.partner) if sample.partner else "",
            )
            for sample in evenly_spaced(SAMPLES, samples)
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
            result=published_result(plan, self._step) if state == "finished" else None,
        )


def _thumbnail(sample: Sample) -> str:
    try:
        return thumbnail(prepared_picture(sample))
    except (MediaError, DeviceError, OSError):
        return ""


def published_result(plan: Plan, step: int) -> Result | None:
    """The published file or folder with a program that uses it; None unless its own note says that it is of `step`."""
    model_type = plan.config.model.model_type
    if result_step(plan.output_dir, model_type) != step:
        return None
    path = plan.output_dir / (LORA_FILE if model_type == "lora" else PIPELINE_FOLDER)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    notes = read_header(path).get(METADATA, {}) if path.is_file() else {}
    result = str(plan.output_dir if path.is_file() else path)
    snippet = example_program(plan, plan.source["transformer"].location, result)
    return Result(path.name, sum(file.stat().st_size for file in files), snippet, describe_errors(notes))


def example_program(plan: Plan, base: str, result: str) -> str:
    """A program that samples the newest preview of the main prompt; empty for LoRA files in ComfyUI's form.

    Args:
        base: hub id or folder of the base model, for a LoRA.
        result: hub id or folder of the LoRA, or of the fine-tuned pipeline.
    """
    config, is_lora = plan.config, plan.config.model.model_type == "lora"
    if is_lora and config.lora.lora_format == "comfyui":
        return ""
    validation = config.validation
    usage = Usage(
        model=base if is_lora else result,
        lora=result if is_lora else None,
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
        solver=validation.validation_noise_scheduler,
    )
    return load_adapter(plan.spec).usage_snippet(usage)
