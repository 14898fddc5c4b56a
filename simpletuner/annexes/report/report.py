"""`training_report.html`: a self-contained page about a run, readable offline.

It shows `training_metrics.jsonl`, `validation_media.jsonl` and the plan, and is rewritten whenever
there is news. Its ledger lists every input file as used, or with the reason why it is not.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, Literal

from simpletuner.annexes.advice.facts import LastSession, facts_of_run, read_files
from simpletuner.annexes.advice.next_step import next_step
from simpletuner.annexes.figures import Columns, course_of_loss, evaluation_points, shares_text
from simpletuner.annexes.publishing.card import published_result
from simpletuner.annexes.report.environment import describe_environment
from simpletuner.annexes.report.html import gallery, render, thin, thumbnail
from simpletuner.atomic import write_atomically
from simpletuner.config.labels import label_of
from simpletuner.config.schema import RunConfig, all_options
from simpletuner.data.dataset import Dataset, ledger_rows
from simpletuner.data.files import DeviceError, MediaError
from simpletuner.data.sample import EXPECTED, HELD_OUT, Sample
from simpletuner.encoding.decoding import prepared_picture
from simpletuner.errors import UserError
from simpletuner.planning.entries import evaluated
from simpletuner.planning.plans import Plan
from simpletuner.redaction import redact, redact_settings
from simpletuner.reporting import events
from simpletuner.reporting.events import ENDED, Event, EventStream
from simpletuner.reporting.metrics import (
    MEDIA_FILE,
    METRICS_FILE,
    REPORT_FILE,
    describe_damage,
    read_media,
    read_rows,
    shares,
)
from simpletuner.reporting.wording import clock_text, pace_text
from simpletuner.run.companions import Companion, Ledger

logger = logging.getLogger(__name__)

SAMPLES = 24  # training pictures in the report
# Seconds after which the page of a running session reloads; a finished report does not.
REFRESH = 30
# More rows would make the page slow; the plan (`--dry-run`) lists all files.
LEDGER_ROWS = 500
OPEN_UP_TO = 24  # files; a longer list starts collapsed
# Every rewrite renders the whole page, so a long run has about this many, a short one fewer.
REWRITES = 20
FEWEST_STEPS = 50  # between two rewrites

ENVIRONMENT_NAMES = {
    "device": "Device",
    "python": "Python",
    "system": "System",
    "processor": "Processor",
}

State = Literal["running", "finished", "stopped", "failed"]


def write_report(path: Path, data: Mapping[str, Any]) -> None:
    """Replace the report.

    Args:
        data: the result of `RunReport.data`.

    Raises:
        DiskFullError: no space; the old report is kept.
    """
    curves_and_previews = gallery(
        data["metrics"], data["previews"], data["output_dir"], with_mfu=has_accelerator(data)
    )
    share = 1.0
    if data["total_steps"]:
        share = min(1.0, data["step"] / data["total_steps"])
    page = render(
        "report.html.jinja",
        data=data,
        files=sum(files for _, files, _, _ in data["datasets"]),
        used=sum(used for _, _, used, _ in data["datasets"]),
        share=share,
        facts=list(facts(data)),
        further_facts=list(further_facts(data)),
        usual_origin=usual_origin(data["settings"]),
        open_up_to=OPEN_UP_TO,
        refresh=REFRESH if data["state"] == "running" else None,
        **curves_and_previews,
    )
    write_atomically(path, page, durable=False)  # can be rebuilt from the record


def facts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The key figures of a run, as (name, text)."""
    metrics: Columns = data["metrics"]
    yield "Step", f"{data['step']:,} of {data['total_steps']:,}"
    yield from course_of_loss(metrics)
    held_out = evaluation_points(metrics)
    if held_out:
        step, lowest = min(held_out, key=itemgetter(1))
        yield f"Held-out loss at step {step:,}", f"{lowest:.4g}"
    seconds = [value for _, value in metrics.points("seconds")]
    if seconds:
        yield "Pace", pace_text(sum(seconds) / len(seconds))
        yield "Time in steps", clock_text(sum(seconds))
    memory = [value for _, value in metrics.points("peak_memory_gb")]
    if memory:
        yield "Peak memory", f"{max(memory):.2f} GB"


def further_facts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the time was spent on, and where the run was, as (name, text)."""
    metrics: Columns = data["metrics"]
    seconds = [value for _, value in metrics.points("seconds")]
    if seconds:
        for_data = [value for _, value in metrics.points("data_seconds")]
        for_weights = [value for _, value in metrics.points("weights_seconds")]
        parts = shares(sum(seconds), sum(for_data), sum(for_weights) if for_weights else None)
        yield "Time spent on", shares_text(parts)
    utilisation = [value for _, value in metrics.points("mfu")]
    if utilisation and has_accelerator(data):
        yield "Median MFU", f"{median(utilisation) * 100:.0f} % of the measured matmul rate"
    for name, value in data["environment"].items():
        yield ENVIRONMENT_NAMES.get(name, name), "CPU" if value == "cpu" else value


def has_accelerator(data: Mapping[str, Any]) -> bool:
    """Whether the run is on a GPU; on a CPU, MFU is not meaningful."""
    return data["environment"].get("device", "unknown") not in ("cpu", "unknown")


def settings_of(config: RunConfig) -> list[dict[str, Any]]:
    """All options of a run in the order of the reference page, with secrets hidden.

    `origin` is what set an option: `default`, `family default`, a file, or the command line.
    `changed` options were set, and differ from the global default. `label` is the name of the
    option on the page.
    """
    values = redact_settings(config.flat)
    keys_set = config.keys_set()
    settings = []
    for name, option in all_options().items():
        default = option.default_note.replace("`", "")
        if not default and not option.required:
            default = _as_text(option.default)
        settings.append(
            {
                "key": name,
                "label": label_of(option),
                "value": _as_text(values[name]),
                "default": default,
                "section": option.section,
                "origin": config.origins.get(name, "default"),
                "changed": values[name] != option.default and name in keys_set,
            }
        )
    return settings


def usual_origin(settings: Sequence[Mapping[str, Any]]) -> str:
    """The origin of most settings that differ from their defaults; empty if there are none."""
    origins = Counter(setting["origin"] for setting in settings if setting["changed"])
    return max(origins, key=origins.__getitem__, default="")


def _as_text(value: Any) -> str:
    """A value as the report shows it."""
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class RunReport(Companion):
    """Rewrites `training_report.html` at intervals, after new previews, and at the end.

    If the report cannot be written, a single warning is logged and the run continues.
    """

    events: EventStream
    plan: Plan = field(init=False)
    _environment: dict[str, str] = field(default_factory=dict, init=False)
    _failed: bool = field(default=False, init=False)

    def begin(self, plan: Plan, step: int) -> None:
        self.plan = plan
        self._environment = describe_environment()
        self.events.subscribe("The report", self)

    def finish(self, ledger: Ledger) -> str:
        return f"Report: {self.plan.output_dir / REPORT_FILE}"

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Evenly spaced training pictures, or first frames of clips, as they are trained.

        They are decoded once per session. Pictures are data URIs; `edited_from` is the source
        picture of a pair, or empty.
        """
        samples = [sample for data in self.plan.trained for sample in data.samples]
        return [
            {
                "name": sample.full_name,
                "source": _thumbnail(sample),
                "captions": sample.captions,
                "is_clip": sample.frames > 1,
                "edited_from": _thumbnail(sample.partner) if sample.partner else "",
            }
            for sample in thin(samples, SAMPLES)
        ]

    def __call__(self, event: Event) -> None:
        total = self.plan.length.total_steps
        interval = max(FEWEST_STEPS, total // REWRITES)
        match event:
            case events.StepReport() if event.step % interval == 0:
                self.write()
            case events.PhaseEnded(events.PhaseStarted(kind=events.PREVIEWS)):
                self.write()
            case events.StateChanged(state="running"):
                self.write()
            # Uploads of a finished run include the report.
            case events.PhaseStarted(kind=events.UPLOADING) if self.events.step == total:
                self.write("finished")
            case events.StateChanged(state="finished"):
                self.write("finished")
            case events.StateChanged(state="failed"):
                self.write("failed", event.message)
            case events.StateChanged() if event.state in ENDED:
                self.write("stopped", event.message)

    def write(self, state: State = "running", message: str = "") -> None:
        """Rewrite the report as of the last step."""
        try:
            write_report(self.plan.output_dir / REPORT_FILE, self.data(state, message))
        except (OSError, UserError) as error:
            # Logged once: on a full disk every rewrite fails.
            if not self._failed:
                logger.warning(
                    "The report cannot be written; the run continues without it. %s", error
                )
            self._failed = True

    def data(self, state: State, message: str) -> dict[str, Any]:
        """The values that the page shows.

        Args:
            message: why the run stopped.
        """
        plan = self.plan
        folder = self.plan.output_dir
        kind = plan.config.lora.kind if plan.config.model.model_type == "lora" else "full fine-tune"
        metrics = Columns.of(read_rows(folder / METRICS_FILE))
        # Id, number of files, number of used files, and trained sizes.
        datasets = []
        for dataset in plan.datasets:
            used = len(dataset.samples)
            files = used + number_left_out(dataset)
            # `96x96 (1.0)` ends with the name of its bucket, which means nothing here.
            sizes = {size.partition(" ")[0] for size in dataset.sizes()}
            datasets.append((dataset.id, files, used, sorted(sizes)))
        damage = [describe_damage(folder / file) for file in (METRICS_FILE, MEDIA_FILE)]
        notes = [*(redact(str(warning)) for warning in plan.warnings), *filter(None, damage)]
        return {
            "title": redact(plan.title),
            "subtitle": f"{kind} on {plan.spec.title} {plan.flavour.name}",
            "state": state,
            "step": self.events.step,
            "total_steps": plan.length.total_steps,
            "output_dir": folder,
            "metrics": metrics,
            "next_step": self._next_step(metrics, state, message),
            "previews": read_media(folder / MEDIA_FILE),
            "settings": settings_of(plan.config),
            "datasets": datasets,
            "ledger": ledger_rows(plan.datasets, LEDGER_ROWS),
            "ledger_lines": sum(map(number_of_lines, plan.datasets)),
            "samples": self.samples,
            "environment": self._environment,
            "message": redact(message),
            "notes": notes,
            "result": published_result(plan, self.events.step) if state == "finished" else None,
        }

    def _next_step(self, metrics: Columns, state: State, message: str) -> str:
        """What to do next with the run; empty where its record does not decide."""
        plan = self.plan
        files = replace(
            read_files("", map(str, plan.warnings)),
            trained=sum(len(dataset.samples) for dataset in plan.trained),
            noun=plan.spec.media_noun,
        )
        held_out = sum(len(dataset.samples) for dataset in evaluated(plan))
        session = LastSession(
            state=state,
            total_steps=plan.length.total_steps,
            files=files,
            message=message,
            passes=held_out * plan.config.evaluation.eval_timesteps,
        )
        step = next_step(facts_of_run(plan.output_dir, metrics, session))
        return "" if step is None else redact(step.sentence)


def number_of_lines(dataset: Dataset) -> int:
    """The lines that a ledger would have without a limit."""
    return len(dataset.samples) + len(dataset.rejected) - dataset.counts()[HELD_OUT]


def number_left_out(dataset: Dataset) -> int:
    """The files that are not used: not those of other kinds, and not those that are evaluated."""
    counts = dataset.counts()
    return counts.total() - sum(counts[reason] for reason in {*EXPECTED, HELD_OUT})


def _thumbnail(sample: Sample) -> str:
    """A small copy of a training picture as a data URI; empty if it cannot be decoded."""
    try:
        return thumbnail(prepared_picture(sample))
    except (MediaError, DeviceError, OSError):
        return ""
