"""`training_report.html`: one file that shows a run on any machine, offline.

It mirrors `training_metrics.jsonl`, `validation_media.jsonl` and the plan, and is rewritten as a whole whenever there
is something new to show. Its ledger lists every input file as used, or with the reason why not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from simpletuner.atomic import write_atomically
from simpletuner.config.load import RunConfig
from simpletuner.config.schema import all_options
from simpletuner.redaction import redact_settings
from simpletuner.reporting.metrics import MediaRecord

if TYPE_CHECKING:
    from simpletuner.reporting.previews import TrainingSample

REPORT_FILE = "training_report.html"

State = Literal["running", "finished", "stopped"]


@dataclass(frozen=True)
class SettingRow:
    """One resolved option.

    Attributes:
        section: its heading in the reference page.
        origin: what set it (`default`, `family default`, a file, the command line).
        changed: whether it differs from the global default.
    """

    key: str
    value: str
    default: str
    section: str
    origin: str
    changed: bool


@dataclass(frozen=True)
class LedgerRow:
    """How one input file is used, in words.

    Attributes:
        size: of the file's picture, such as `1200x800`.
        bucket: the size at which it is trained.
        crop: what is cut off, such as `left 16, top 0`.
        reason: why it is not used, or a note.
    """

    dataset: str
    file: str
    used: bool
    size: str = ""
    bucket: str = ""
    crop: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Result:
    """What a finished run published.

    Attributes:
        path: relative to the output folder.
        size: in bytes.
        snippet: Python that loads it and samples with it.
        errors: of a LoRA that was converted from another adapter: relative error of the update and of a prediction.
    """

    path: str
    size: int
    snippet: str
    errors: tuple[str, ...] = ()

    @property
    def size_text(self) -> str:
        return f"{self.size / 1e6:,.1f} MB" if self.size < 1e9 else f"{self.size / 1e9:,.1f} GB"


@dataclass(frozen=True)
class ReportData:
    """Everything the page shows.

    Attributes:
        title: name of the run.
        subtitle: what is trained, in a few words (`LoRA on kandinsky5-image t2i-lite-sft`).
        step, total_steps: the last finished step, and the planned number of steps.
        output_dir: paths of previews are relative to it.
        metrics: rows of `training_metrics.jsonl`.
        previews: entries of `validation_media.jsonl`.
        samples: some of the training data.
        message: why a run stopped.
        notes: warnings of the plan.
        result: None until the run is finished.
    """

    title: str
    state: State
    step: int
    total_steps: int
    output_dir: Path
    subtitle: str = ""
    metrics: Sequence[Mapping[str, Any]] = ()
    previews: Sequence[MediaRecord] = ()
    settings: Sequence[SettingRow] = ()
    ledger: Sequence[LedgerRow] = ()
    samples: Sequence[TrainingSample] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    notes: Sequence[str] = ()
    result: Result | None = None


def write_report(path: Path, data: ReportData) -> None:
    """Replace the report.

    Raises:
        DiskFullError: there was no space; the old report is kept.
    """
    # Imported late: the page needs Pillow, and code that only builds `ReportData` does not.
    from simpletuner.reporting.page import render_page

    write_atomically(path, render_page(data), durable=False)


def settings_of(config: RunConfig) -> list[SettingRow]:
    """All options of a run in the order of the reference page, with secrets hidden."""
    values = redact_settings(config.flat())
    return [
        SettingRow(
            key=name,
            value=_worded(values[name]),
            default=option.default_note.replace("`", "") or ("" if option.required else _worded(option.default)),
            section=option.section,
            origin=config.origins.get(name, "default"),
            changed=values[name] != option.default,
        )
        for name, option in all_options().items()
    ]


def _worded(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
