"""Comparisons of checkpoints on the page: how long they take, and how far they are."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.page.project import checked_value
from simpletuner.annexes.page.runs.chosen_file import SavedWeights
from simpletuner.annexes.page.runs.live import runs_of
from simpletuner.annexes.page.runs.queue import RUNNING, WAITING, Job
from simpletuner.annexes.report.comparison import CheckpointTable
from simpletuner.annexes.report.html import grid_order
from simpletuner.annexes.report.sheet import CONTENT, Sheet, SheetCell
from simpletuner.annexes.runs.run import Run
from simpletuner.config.types import parse_number
from simpletuner.errors import UserError, counted
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.checkpoint_folder import SWEEP_FOLDER, find_checkpoints
from simpletuner.planning.lock import Owner, worker_in
from simpletuner.reporting.metrics import MEDIA_FILE, read_media
from simpletuner.reporting.wording import duration_text

STRENGTHS = "0.5, 0.75, 1"  # that a comparison proposes
PREVIEW_STAGES = ("validation", "benchmark_base_model")


def preview_cells(run: Run) -> list[SheetCell]:
    """The previews of a run as cells at strength 1."""
    return [SheetCell(**asdict(record)) for record in read_media(run.folder / MEDIA_FILE)]


@dataclass(frozen=True)
class UnderWay:
    """A comparison that is being made, or waits in the queue.

    Attributes:
        job: its id in the queue; empty if it was started in a terminal.
        done, total: pictures; the total is 0 while the model is being loaded.
        left: the time left, as text; empty if unknown.
    """

    job: str
    waits: bool
    done: int = 0
    total: int = 0
    left: str = ""


def comparison_under_way(run: Run, request: Request, table: CheckpointTable) -> UnderWay | None:
    """The comparison of a run that is being made; None if there is none."""
    job = job_of(run, request)
    if job is not None and job.state == WAITING:
        return UnderWay(job.id, waits=True)
    owner = worker_in(run.folder / SWEEP_FOLDER)
    if job is not None and owner is None:
        owner = job.owner  # its worker has not yet come to the folder, or has let go of it
    name = job.id if job else ""
    if owner is None or not has_begun(run, owner):
        return UnderWay(name, waits=False) if job or owner else None
    listed = {cell.record.path for cell in table.cells}
    done = {cell.record.path for cell in table.cells if cell.source}
    missing = len(listed) - len(done)
    seconds = seconds_since(run, done, owner.since)
    left = duration_text(missing * seconds) if seconds and missing else ""
    return UnderWay(name, waits=False, done=len(done), total=len(listed), left=left)


def has_begun(run: Run, owner: Owner) -> bool:
    """Whether the comparison of a process has listed its cells."""
    with suppress(OSError):
        return (run.folder / SWEEP_FOLDER / CONTENT).stat().st_mtime >= owner.since
    return False


def job_of(run: Run, request: Request) -> Job | None:
    """The comparison of a run in the queue."""
    with suppress(UserError, OSError):  # a damaged queue, which its own part reports
        for job in request.app.state.runner.queue.read():
            is_active = job.state in (RUNNING, WAITING)
            if is_active and job.command == "sweep" and Path(job.folder) == run.folder:
                return job
    return None


def seconds_since(run: Run, paths: Set[str], since: float) -> float:
    """Seconds that a render took since a time; 0 until two are made."""
    times = set()
    for path in paths:
        with suppress(OSError):
            times.add((run.folder / path).stat().st_mtime)
    recent = sorted(moment for moment in times if moment >= since)
    gaps = [after - before for before, after in pairwise(recent)]
    return median(gaps) if gaps else 0.0


def seconds_of_previews(run: Run) -> float:
    """Seconds that a preview of the run took, in its newest round; 0 if none was timed."""
    seconds = 0.0
    begun: dict[str, tuple[float, int]] = {}  # by round: when, and how many were made
    for event in run.recent:
        stage = event.get("stage")
        if not isinstance(stage, dict) or stage.get("key") not in PREVIEW_STAGES:
            continue
        with suppress(KeyError, TypeError, ValueError):
            moment = datetime.fromisoformat(event["timestamp"]).timestamp()
            done = int(stage["progress"]["current"])
            first, before = begun.setdefault(str(stage["label"]), (moment, done))
            if done > before:
                seconds = (moment - first) / (done - before)
    return seconds


def compare_form(run: Run, saved: SavedWeights) -> dict[str, Any]:
    """Template values for the form that compares checkpoints."""
    previews = sorted(preview_cells(run), key=grid_order)
    prompts = {cell.prompt: cell.short_name for cell in previews}
    strengths = "1" if saved.is_full else STRENGTHS
    return {
        "prompts": {text: prompts[text] for text in prompts if text} or prompts,
        "can_choose": not takes_pictures(run),
        "strengths": strengths,
        "estimate": estimate(run, [*prompts], strengths, ""),
    }


def takes_pictures(run: Run) -> bool:
    """Whether the model renders from pictures, which belong to the prompts of the run."""
    saves, _ = find_checkpoints(run.folder)
    if not saves:
        return False
    identity = saves[-1].manifest.identity
    spec = FAMILIES.get(identity.model_family)
    for flavour in spec.flavours if spec else ():
        if flavour.name == identity.model_flavour:
            return flavour.task in ("i2i", "i2v")
    return False


def estimate(run: Run, prompts: Sequence[str], strengths: str, checkpoints: str) -> str:
    """How many pictures a comparison needs, and how long they take; why not, if it cannot be."""
    saved = SavedWeights.of(run.folder)
    try:
        numbers = {parse_number(text) for text in strengths.split(",") if text.strip()}
        steps = {int(text) for text in checkpoints.split(",") if text.strip()}
    except ValueError:
        return "Strengths and checkpoints are numbers, such as 0.5, 0.75, 1."
    unknown = sorted(steps.difference(saved.checkpoints))
    if unknown:
        return f"There is no checkpoint of step {unknown[0]:,}."
    wanted = wanted_cells(run, prompts, numbers or {1.0}, steps or {*saved.steps}, saved)
    if not wanted:
        return "The run has rendered no previews: its prompts, and so the number, are not known."
    made = rendered_cells(run)
    missing = len(wanted - made)
    if not missing:
        return "All of them are rendered already."
    noun = media_noun(run)
    text = counted(missing, noun)
    seconds = seconds_of_previews(run)
    if seconds:
        text += f", about {duration_text(missing * seconds)}"
    elif run.recent:
        text += "; the run has not measured how long one takes"
    if missing < len(wanted):
        text += f" ({len(wanted) - missing} of {len(wanted)} are rendered already)"
    return text


Wanted = tuple[str, int, float]  # prompt, step, strength


def wanted_cells(
    run: Run,
    prompts: Sequence[str],
    strengths: set[float],
    steps: set[int],
    saved: SavedWeights,
) -> set[Wanted]:
    """The cells of a comparison."""
    wanted = {
        (prompt, step, strength)
        for prompt in prompts
        for step in steps
        for strength in strengths
        if strength
    }
    if not saved.is_full:
        wanted |= {(prompt, 0, 0.0) for prompt in prompts}
    return wanted


def rendered_cells(run: Run) -> set[Wanted]:
    """The cells of the latest comparison that exist."""
    with suppress(UserError):
        sheet = Sheet.read(run.folder / SWEEP_FOLDER, run.name, run.metrics)
        return {(cell.prompt, cell.step, cell.strength) for cell in sheet.records}
    return set()


def media_noun(run: Run) -> str:
    """What the run renders: picture or clip."""
    return "clip" if any(cell.is_video for cell in preview_cells(run)) else "picture"


def post_estimate(request: Request, body: dict[str, Any]) -> Response:
    """The estimate of a comparison.

    The body is `{"run": ID, "prompts": [...], "strengths": "0.5, 1", "checkpoints": "100"}`.
    """
    run = runs_of(request).find(str(body.get("run", "")))
    prompts = [str(prompt) for prompt in checked_value({"prompts": [], **body}, "prompts", list)]
    written = [prompt.strip() for prompt in prompts if prompt.strip()]
    if not written:
        written = [cell.prompt for cell in preview_cells(run)]
    strengths = str(body.get("strengths") or "1")
    text = estimate(run, written, strengths, str(body.get("checkpoints") or ""))
    return JSONResponse({"estimate": text})
