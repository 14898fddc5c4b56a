"""`training_report.html`: a self-contained page about a run, readable offline.

It shows `training_metrics.jsonl`, `validation_media.jsonl` and the plan, and is rewritten whenever
there is news. Its ledger lists every input file as used, or with the reason why it is not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

from simpletuner.annexes.figures import Columns, shares_text
from simpletuner.annexes.publishing.card import published_result
from simpletuner.annexes.report.environment import describe_environment
from simpletuner.annexes.report.html import gallery, render, thin, thumbnail
from simpletuner.atomic import write_atomically
from simpletuner.config.schema import RunConfig, all_options
from simpletuner.data.dataset import ledger_rows
from simpletuner.data.files import DeviceError, MediaError
from simpletuner.data.sample import Sample
from simpletuner.encoding.decoding import prepared_picture
from simpletuner.errors import UserError
from simpletuner.planning.plans import Plan
from simpletuner.redaction import redact, redact_settings
from simpletuner.reporting import events as happened
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

State = Literal["running", "finished", "stopped"]


def write_report(path: Path, data: Mapping[str, Any]) -> None:
    """Replace the report.

    Args:
        data: the result of `RunReport.data`.

    Raises:
        DiskFullError: no space; the old report is kept.
    """
    shown = gallery(
        data["metrics"], data["previews"], data["output_dir"], with_mfu=has_accelerator(data)
    )
    page = render(
        "report.html.jinja",
        data=data,
        files=sum(whole for _, whole, _, _ in data["datasets"]),
        used=sum(used for _, _, used, _ in data["datasets"]),
        share=min(1.0, data["step"] / data["total_steps"]) if data["total_steps"] else 1.0,
        facts=list(facts(data)),
        open_up_to=OPEN_UP_TO,
        refresh=REFRESH if data["state"] == "running" else None,
        **shown,
    )
    write_atomically(path, page, durable=False)  # can be rebuilt from the record


def facts(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The key figures of a run, as (name, text)."""
    metrics: Columns = data["metrics"]
    yield "Step", f"{data['step']:,} of {data['total_steps']:,}"
    losses = [value for _, value in metrics.points("train_loss")]
    if losses:
        # Means of tenths: single losses depend on the sampled noise level.
        tenth = max(1, len(losses) // 10)
        first = sum(losses[:tenth]) / tenth
        last = sum(losses[-tenth:]) / tenth
        yield "Loss, first to last tenth", f"{first:.3g} → {last:.3g}"
    yield from time_facts(metrics)
    if memory := metrics.points("peak_memory_gb"):
        yield "Peak memory", f"{max(value for _, value in memory):.1f} GB"
    utilisation = [value for _, value in metrics.points("mfu")]
    if utilisation and has_accelerator(data):
        yield "Median MFU", f"{median(utilisation) * 100:.0f} % of the measured matmul rate"
    if data["datasets"]:
        _, whole, used, _ = zip(*data["datasets"], strict=True)
        yield "Files used", f"{sum(used):,} of {sum(whole):,}"
    if device := data["environment"].get("device"):
        yield "Device", device.partition(",")[0]


def time_facts(metrics: Columns) -> Iterator[tuple[str, str]]:
    """How long steps took, and what they waited for."""
    seconds = [value for _, value in metrics.points("seconds")]
    if seconds:
        yield "Pace", pace_text(sum(seconds) / len(seconds))
        yield "Time in steps", clock_text(sum(seconds))
        waited, streamed = (
            [value for _, value in metrics.points(key)]
            for key in ("data_seconds", "weights_seconds")
        )
        parts = shares(sum(seconds), sum(waited), sum(streamed) if streamed else None)
        yield "Time spent on", shares_text(parts)


def has_accelerator(data: Mapping[str, Any]) -> bool:
    """Whether the run is on a GPU; on a CPU, MFU is not meaningful."""
    return data["environment"].get("device", "unknown") not in ("cpu", "unknown")


def settings_of(config: RunConfig) -> list[dict[str, Any]]:
    """All options of a run in the order of the reference page, with secrets hidden: what set each
    (`default`, `family default`, a file, the command line), and whether it differs from the global
    default."""
    values = redact_settings(config.flat)
    keys_set = config.keys_set()
    return [
        {
            "key": name,
            "value": _worded(values[name]),
            "default": option.default_note.replace("`", "")
            or ("" if option.required else _worded(option.default)),
            "section": option.section,
            "origin": config.origins.get(name, "default"),
            "changed": values[name] != option.default and name in keys_set,
        }
        for name, option in all_options().items()
    ]


def _worded(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class RunReport(Companion):
    """Companion that rewrites `training_report.html` at intervals, after new previews, and at the
    end.

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
        """Evenly spaced training pictures, or first frames of clips, as they are trained; decoded
        once per session.

        Pictures are data URIs; `edited_from` is the source picture of a pair, or empty.
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
        match event:
            # Every rewrite renders the whole page, so a long run has only about 20 of them.
            case happened.StepReport() if event.step % max(50, total // 20) == 0:
                self.write()
            case happened.PhaseEnded(happened.PhaseStarted(kind=happened.PREVIEWS)):
                self.write()
            case happened.StateChanged(state="running"):
                self.write()
            # Uploads of a finished run include the report.
            case happened.PhaseStarted(kind=happened.UPLOADING) if self.events.step == total:
                self.write("finished")
            case happened.StateChanged(state="finished"):
                self.write("finished")
            case happened.StateChanged() if event.state in ENDED:
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
        damage = [describe_damage(folder / file) for file in (METRICS_FILE, MEDIA_FILE)]
        kind = plan.config.lora.kind if plan.config.model.model_type == "lora" else "full fine-tune"
        return {
            "title": redact(plan.title),
            "subtitle": f"{kind} on {plan.spec.name} {plan.flavour.name}",
            **{
                "state": state,
                "step": self.events.step,
                "total_steps": plan.length.total_steps,
                "output_dir": folder,
            },
            "metrics": Columns.of(read_rows(folder / METRICS_FILE)),
            "previews": read_media(folder / MEDIA_FILE),
            "settings": settings_of(plan.config),
            # Id, number of files, number of used files, and trained sizes.
            "datasets": [
                (
                    data.id,
                    len(data.samples) + len(data.rejected),
                    len(data.samples),
                    sorted(data.sizes()),
                )
                for data in plan.datasets
            ],
            "ledger": ledger_rows(plan.datasets, LEDGER_ROWS),
            "samples": self.samples,
            "environment": self._environment,
            "message": redact(message),
            "notes": [*(redact(str(warning)) for warning in plan.warnings), *filter(None, damage)],
            "result": published_result(plan, self.events.step) if state == "finished" else None,
        }


def _thumbnail(sample: Sample) -> str:
    try:
        return thumbnail(prepared_picture(sample))
    except (MediaError, DeviceError, OSError):
        return ""
