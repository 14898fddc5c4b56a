"""The dataset ledger of the report: every input file is used, or listed with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .report import LedgerRow

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
