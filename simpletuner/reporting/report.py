"""`training_report.html`: one file that shows a run to anybody, on any machine, without a network.

The file is a mirror of `training_metrics.jsonl`, `validation_media.jsonl` and the plan; it is written anew, whole,
whenever the run has something to show. Every input file is in its ledger, as used or with the reason why not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from simpletuner.atomic import write_atomically
from simpletuner.config.load import RunConfig
from simpletuner.config.schema import all_options
from simpletuner.reporting.metrics import MediaRecord
from simpletuner.reporting.redaction import redact_settings

# More rows make the page heavy; the plan (`--dry-run`) lists them all.
SHOWN = 500
OPEN_UP_TO = 24


def ledger_section(ledger: Sequence[LedgerRow]) -> str:
    """Counts for each dataset, then the files; rejected ones come first, because they are what one looks for."""
    if not ledger:
        return ""
    ordered = sorted(ledger, key=lambda row: row.used)
    shown = ordered[:SHOWN]
    rest = len(ordered) - len(shown)
    more = f'<p class="hint">And {rest:,} more files; <code>simpletuner plan</code> lists them all.</p>' if rest else ""
    head = "<tr><th>File</th><th>Size</th><th>Trained at</th><th>Cut off</th><th>State</th></tr>"
    state = " open" if len(ordered) <= OPEN_UP_TO else ""
    return f"""<section>
<h2>Dataset</h2>
{"".join(_dataset_summary(name, ledger) for name in dict.fromkeys(row.dataset for row in ledger))}
<details{state}><summary>{len(ordered):,} files</summary>
<div class="scroll"><table class="rows ledger"><thead>{head}</thead><tbody>
{"".join(_row(row) for row in shown)}</tbody></table></div>{more}</details>
</section>
"""


def _dataset_summary(name: str, ledger: Sequence[LedgerRow]) -> str:
    rows = [row for row in ledger if row.dataset == name]
    used = sum(row.used for row in rows)
    buckets = sorted({row.bucket for row in rows if row.used and row.bucket})
    sizes = f", trained at {escape(', '.join(buckets[:6]))}{' …' if len(buckets) > 6 else ''}" if buckets else ""
    rejected = f' <span class="badge bad">{len(rows) - used:,} not used</span>' if used < len(rows) else ""
    return f'<p class="dataset"><b>{escape(name)}</b> {used:,} of {len(rows):,} files used{sizes}{rejected}</p>'


def _row(row: LedgerRow) -> str:
    state = "used" if row.used else "not used"
    reason = f": {escape(row.reason)}" if row.reason else ""
    return (
        f'<tr><td class="key">{escape(row.file)}<span class="dim"> {escape(row.dataset)}</span></td>'
        f"<td>{escape(row.size)}</td><td>{escape(row.bucket)}</td><td>{escape(row.crop)}</td>"
        f'<td class="{"good" if row.used else "bad"}">{state}{reason}</td></tr>'
    )


REPORT_FILE = "training_report.html"

State = Literal["running", "finished", "stopped"]


@dataclass(frozen=True)
class Setting:
    """One resolved option.

    Attributes:
        section: heading of the reference page it stands under.
        origin: what decided it (`default`, `family default`, a file, the command line).
        changed: it differs from the global default.
    """

    key: str
    value: str
    default: str
    section: str
    origin: str
    changed: bool


@dataclass(frozen=True)
class LedgerRow:
    """What became of one input file, worded for people.

    Attributes:
        size: of the file's picture, such as `1200x800`.
        bucket: size it is trained at.
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
class ReportData:
    """Everything the page shows.

    Attributes:
        title: name of the run.
        subtitle: what is trained, in a few words (`LoRA on kandinsky5-image t2i-lite-sft`).
        step, total_steps: where the run is and where it will end.
        output_dir: paths of previews are relative to it.
        metrics: rows of `training_metrics.jsonl`.
        previews: entries of `validation_media.jsonl`.
        message: why a run stopped.
        notes: warnings of the plan.
    """

    title: str
    state: State
    step: int
    total_steps: int
    output_dir: Path
    subtitle: str = ""
    metrics: Sequence[Mapping[str, Any]] = ()
    previews: Sequence[MediaRecord] = ()
    settings: Sequence[Setting] = ()
    ledger: Sequence[LedgerRow] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    message: str = ""
    notes: Sequence[str] = ()


def write_report(path: Path, data: ReportData) -> None:
    """Replace the report by one of this state.

    Raises:
        DiskFullError: there was no space; the old report is kept.
    """
    # The page needs Pillow and the template files, which those who only fill in `ReportData` do not.
    from simpletuner.reporting.page import render_page

    write_atomically(path, render_page(data), durable=False)


def settings_of(config: RunConfig) -> list[Setting]:
    """All options of a run in the order of the reference page, with secrets hidden."""
    values = redact_settings(config.flat())
    return [
        Setting(
            key=name,
            value=_worded(values[name]),
            default=option.default_note or ("" if option.required else _worded(option.default)),
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
