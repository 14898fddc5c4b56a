"""The list of all runs on the page: the newest first, those not started and the archived ones."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from simpletuner.annexes.languages.say import say, say_counted, spoken
from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.runs.archive import home_of
from simpletuner.annexes.page.runs.control import Runs
from simpletuner.annexes.payloads import EVENTS_FILE, last_lines
from simpletuner.annexes.report import html
from simpletuner.annexes.report.html import MAIN_PROMPT
from simpletuner.annexes.runs.console import CONSOLE_FILE
from simpletuner.annexes.runs.run import Run
from simpletuner.annexes.runs.state import ACTIVE
from simpletuner.planning.checkpoint_folder import FILE_NAME
from simpletuner.planning.lock import LOCK_FILE, STARTED_FILE
from simpletuner.reporting.metrics import MEDIA, MEDIA_FILE, METRICS_FILE, MediaRecord, parse_row

# Files whose change may change a row.
WATCHED = (EVENTS_FILE, METRICS_FILE, MEDIA_FILE, LOCK_FILE, CONSOLE_FILE, STARTED_FILE, "")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
MEDIA_BYTES = 1 << 16  # at the end of the record of previews, more than a round takes

FileTimes = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ListedRun:
    """A run in the list.

    Attributes:
        title: its name; its folder, if another run has the same name.
        status: as in `Run.status`.
        words: how far it is or got: `120 of 300`, `at 110, can continue`.
        when: when it last wrote to its folder.
        thumbnail: the URL of its last preview; empty without one.
        home: for an archived run, the folder that it came from.
    """

    run: Run
    title: str
    status: str
    state: str
    words: str
    when: str
    thumbnail: str
    home: str = ""

    @property
    def is_active(self) -> bool:
        """Whether it trains."""
        return self.status in ACTIVE

    @property
    def sought(self) -> str:
        """The text in which a search looks."""
        return f"{self.title} {self.run.written_by} {self.state} {self.words} {self.when}"


class RunCache:
    """The rows of runs that have ended, in every language, until a file of theirs changes."""

    def __init__(self) -> None:
        self._rows: dict[tuple[Path, str], tuple[FileTimes, dict[str, Any], str]] = {}

    def look(self, run: Run) -> tuple[dict[str, Any], str]:
        """The status of a run, and the URL of its last preview."""
        times = times_of(run.folder)
        known = self._rows.get((run.folder, spoken()))
        if known is not None and known[0] == times and run.pid is None:
            return known[1], known[2]
        status = run.status()
        thumbnail = thumbnail_of(run.folder)
        # The state of a run that is at work may change without a file: its process may be killed.
        if status["status"] not in ACTIVE and run.pid is None:
            self._rows[run.folder, spoken()] = times, status, thumbnail
        return status, thumbnail


_cache = RunCache()
_listing = threading.Lock()  # several browsers ask at once


def times_of(folder: Path) -> FileTimes:
    """Times and sizes of the files from which a row is made."""
    return tuple(_time_and_size(folder / name) for name in WATCHED)


def _time_and_size(path: Path) -> tuple[int, int]:
    """When a file or folder was changed, and its size; zeros if it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def get_list(request: Request) -> Response:
    """All runs, as HTML."""
    return HTMLResponse(listed(request.app.state.runs))


def listed(runs: Runs) -> str:
    """The list of all runs, as HTML."""

    def draw() -> str:
        with _listing:
            rows = told_apart([listed_run(run) for run in runs.all()])
            archived = [listed_run(run, is_archived=True) for run in runs.archived()]
        started = [row for row in rows if row.status != "idle"]
        started.sort(key=lambda row: (row.is_active, row.run.seen), reverse=True)
        return html.render(
            "page/runs/run_list.html.jinja",
            rows=started,
            not_started=sorted_by_name([row for row in rows if row.status == "idle"]),
            archived=archived,
            may_change=runs.project.run is None,
        )

    return draw_part("Runs", draw)


def told_apart(rows: Sequence[ListedRun]) -> list[ListedRun]:
    """Rows in which runs of the same name have their folders as titles."""
    count = Counter(row.title for row in rows)
    return [
        replace(row, title=row.run.shown_folder) if count[row.title] > 1 else row for row in rows
    ]


def sorted_by_name(rows: Sequence[ListedRun]) -> list[ListedRun]:
    """Rows by the names of their configs, those of packaged examples last."""
    return sorted(rows, key=lambda row: ("/" in row.run.written_by, row.run.written_by))


def listed_run(run: Run, *, is_archived: bool = False) -> ListedRun:
    """The row of a run."""
    status, thumbnail = _cache.look(run)
    state, words = state_in_words(run.folder, status)
    return ListedRun(
        run=run,
        title=run.name,
        status=status["status"],
        state=state,
        words=words,
        when=moment(run.seen),
        thumbnail=thumbnail,
        home=home_of(run.folder).name if is_archived else "",
    )


def state_in_words(folder: Path, status: dict[str, Any]) -> tuple[str, str]:
    """The state of a run in the words of its page, and how far it is or got."""
    current = status["progress"]["current"]
    total = status["progress"]["total"]
    step = f"{current:,}"
    state = status["label"]
    at = say("at {step}", step=step) if current else say("before the first step")
    match status["status"]:
        case "running":
            return state, say("{done} of {total}", done=step, total=f"{total:,}") if total else step
        case "completed":
            return state, say_counted(current, "1 step", "{count} steps") if current else ""
        case "cancelled" | "interrupted":
            # The badge of a list is short: `stopped at 110, can continue` is split.
            is_stopped = state == say("stopped at {step}, can continue", step=step)
            return say("stopped") if is_stopped else state, what_remains(folder, at, current)
        case "error":
            return state, at
    return state, ""


def what_remains(folder: Path, at: str, step: int) -> str:
    """Where a run ended early, and whether it can go on."""
    if any(folder.glob(f"checkpoint-*/{FILE_NAME}")):
        return say("{at}, can continue", at=at)
    return say("{at}, nothing saved", at=at) if step else at


def moment(seconds: float) -> str:
    """A time of the past: `today 14:05`, `yesterday 9:30`, `27 Nov 14:05`, `27 Nov 2025`."""
    if not seconds:
        return ""
    then = datetime.fromtimestamp(seconds).astimezone()
    today = datetime.now().astimezone().date()
    clock = f"{then.hour}:{then.minute:02}"
    if then.date() == today:
        return say("today {clock}", clock=clock)
    if then.date() == today - timedelta(days=1):
        return say("yesterday {clock}", clock=clock)
    date = say("{day} {month}", day=then.day, month=say(MONTHS[then.month - 1]))
    if then.year == today.year:
        return say("{date} {clock}", date=date, clock=clock)
    return say("{date} {year}", date=date, year=then.year)


def thumbnail_of(folder: Path) -> str:
    """The URL of a small copy of a run's last preview; empty without one."""
    record = last_preview(folder)
    if record is None:
        return ""
    file = folder / record.path
    changed = file.stat().st_mtime_ns
    return f"/library/thumbnail?{urlencode({'path': str(file), 'stamp': changed})}"


def last_preview(folder: Path) -> MediaRecord | None:
    """The preview of the main prompt of the last step, or else its first preview."""
    shown: MediaRecord | None = None
    for line in reversed(last_lines(folder / MEDIA_FILE, MEDIA_BYTES)):
        record = _record_in(line)
        if record is None or not (folder / record.path).is_file():
            continue
        if shown is not None and record.step != shown.step:
            break
        shown = record
        if record.short_name == MAIN_PROMPT and not record.ema:
            break
    return shown


def _record_in(line: bytes) -> MediaRecord | None:
    """The preview in a line of the record; None if it is damaged."""
    try:
        return MEDIA.validate_python(parse_row(line))
    except ValidationError:
        return None
