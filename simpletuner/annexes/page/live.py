"""Routes of runs: state, events, curves and previews, and the buttons."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from simpletuner.annexes.page.control import Runs, ask, cancel
from simpletuner.annexes.page.project import SANDBOX_WITH_CLIPS, Refusal, read_object
from simpletuner.annexes.page.runs import Run, record_in
from simpletuner.annexes.page.story import Tail
from simpletuner.errors import UserError
from simpletuner.reporting.curves import charts_of, hours_of, thin_extremes
from simpletuner.reporting.html import left_out, render
from simpletuner.reporting.metrics import MEDIA_FILE, MIME, VIDEO_MIME, Columns, parse_row, read_media
from simpletuner.reporting.pace import RunningMean, clock, pace_text
from simpletuner.reporting.payloads import EVENTS_FILE, last_id, offset_after
from simpletuner.reporting.previews import build_grid
from simpletuner.reporting.report import REPORT_FILE

POLL, HEARTBEAT = 0.5, 15.0  # seconds
POINTS, MAX_POINTS = 2000, 20_000  # of a curve in an answer, usually and at most
LOG_LINES = 300
SHOWN = {*MIME, *VIDEO_MIME, ".gif"}
Act = Callable[[Run], None]
_drawing = threading.Lock()  # curves of a long run take 40 MB while they are drawn


def routes() -> list[Route]:
    """Routes under /api/training, /api/events, /api/metrics/training, /media, /report and /runs."""
    training, figures = "/api/training", "/api/metrics/training/runs"
    return [
        Route(f"{training}/status", status),
        Route(f"{training}/start", start, methods=["POST"]),
        Route(f"{training}/new", renew, methods=["POST"]),
        *(Route(training + path, partial(press, act), methods=["POST"]) for path, act in BUTTONS.items()),
        Route(f"{training}/events", events),
        Route("/api/events/recent", recent),
        Route(figures, summaries),
        Route(f"{figures}/{{run}}", metrics),
        Route("/media/{run}/{path:path}", media),
        Route("/report/{run}", report),
        Route("/runs", listing),
        Route("/runs/{run}/{part}", view),
    ]


def runs_of(request: Request) -> Runs:
    """All runs of the project."""
    return cast(Runs, request.app.state.runs)


def chosen(request: Request) -> Run:
    """The run that a request names, else the first."""
    return runs_of(request).find(request.path_params.get("run") or request.query_params.get("run"))


def status(request: Request) -> Response:
    """What a run does; of no particular one, the first."""
    if not request.query_params.get("run") and not runs_of(request).all():
        return JSONResponse({"status": "idle", "run": None})
    return JSONResponse(chosen(request).status())


def summaries(request: Request) -> Response:
    """What all runs do."""
    return JSONResponse([run.status() for run in runs_of(request).all()])


async def start(request: Request) -> Response:
    """Start a config, or a run again: `{"config": NAME, "settings": {...}}` or `{"run": ID, "settings": {...}}`."""
    wanted, runs = await read_object(request), runs_of(request)
    settings = wanted.get("settings", {})
    if not isinstance(settings, dict):
        raise Refusal(400, "settings: must be an object.")
    if "run" in wanted:
        run = await run_in_threadpool(lambda: runs.resume(runs.find(str(wanted["run"])), settings))
    else:
        run = await run_in_threadpool(runs.start, str(wanted.get("config", "config")), settings)
    return JSONResponse({"run": run.id}, 202)


async def renew(request: Request) -> Response:
    """Write a config that starts from the LoRA of a run: `{"run": ID, "name": NAME}`."""
    wanted, runs = await read_object(request), runs_of(request)
    run = await run_in_threadpool(runs.find, str(wanted.get("run", "")))
    file = await run_in_threadpool(runs.renew, run, str(wanted.get("name", "")))
    return JSONResponse({"config": file.parent.name}, 201)


async def press(act: Act, request: Request) -> Response:
    """Press a button of a run: `{"run": ID}`."""
    wanted = await read_object(request)
    run = await run_in_threadpool(runs_of(request).find, str(wanted.get("run") or ""))
    await run_in_threadpool(act, run)
    return JSONResponse({"run": run.id}, 202)


async def events(request: Request) -> Response:
    """The events of a run as they come."""
    run = await run_in_threadpool(chosen, request)
    last = request.headers.get("last-event-id", "")
    path = run.folder / EVENTS_FILE
    after = int(last[:18]) if last.isdecimal() else await run_in_threadpool(last_id, path)
    return StreamingResponse(
        event_stream(path, after), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
    )


def recent(request: Request) -> Response:
    """The newest events of a run."""
    return JSONResponse(chosen(request).recent)


def metrics(request: Request) -> Response:
    """The curves of a run as numbers: `?metric=NAME&max_points=N`."""
    run, asked = chosen(request), request.query_params
    columns, limit = run.metrics, asked.get("max_points", "")
    with _drawing:
        points = decimated(columns, asked.getlist("metric"), int(limit[:18]) if limit.isdecimal() else POINTS)
        return JSONResponse({"run": run.id, "metrics": points, "hours": hours_of(columns)})


def media(request: Request) -> Response:
    """A preview."""
    return file_of(chosen(request), request.path_params["path"])


def report(request: Request) -> Response:
    """The HTML report, at an address where its links work."""
    return RedirectResponse(f"/media/{chosen(request).id}/{REPORT_FILE}")


def listing(request: Request) -> Response:
    """All runs, as HTML."""
    shown = [(run, run.status()) for run in runs_of(request).all()]
    return HTMLResponse(render("server/run_parts.html.jinja", part="list", runs=shown))


def view(request: Request) -> Response:
    """A part of a run's view, as HTML."""
    name = request.path_params["part"]
    if name not in VALUES:
        raise Refusal(404, f"A run has no part {name!r}.")
    run = chosen(request)
    return HTMLResponse(render("server/run_parts.html.jinja", part=name, run=run, **VALUES[name](run)))


BUTTONS: Mapping[str, Act] = {
    "/stop": lambda run: ask(run, "stop"),
    "/stop_at_epoch_end": lambda run: ask(run, "stop_at_epoch_end"),
    "/validation/run": lambda run: ask(run, "preview"),
    "/checkpoint/run": lambda run: ask(run, "save"),
    "/cancel": cancel,
}


async def event_stream(path: Path, after: int) -> AsyncIterator[str]:
    """Server-sent events: those after an id, then every new one, until the client leaves."""
    tail = Tail(path, "id", partial(offset_after, number=after))
    yield ": connected\n\n"
    sent_at = time.monotonic()
    while True:
        # A part at a time: what a client does not read stays in the file.
        lines = await run_in_threadpool(tail.lines)
        for event in filter(None, (parse_row(line, "id") for line in lines)):
            sent_at = time.monotonic()
            yield f"id: {event['id']}\nevent: {event.get('type')}\ndata: {json.dumps(event)}\n\n"
        if time.monotonic() - sent_at > HEARTBEAT:
            sent_at = time.monotonic()
            yield ": alive\n\n"
        await asyncio.sleep(0 if lines else POLL)


def decimated(metrics: Columns, names: Sequence[str], limit: int) -> dict[str, list[Any]]:
    """Points of the named metrics, or of all, with the extremes of each stretch."""
    count = max(2, min(limit, MAX_POINTS))
    curves = {name: thin_extremes(metrics.points(name), count) for name in names or metrics.names}
    return {name: points for name, points in curves.items() if points}


def file_of(run: Run, path: str) -> Response:
    """A picture, clip or the report of a run; ranges are answered, which players need.

    Raises:
        Refusal: 404 if it is something else, or outside the folder; 400 if it cannot be a path.
    """
    try:
        file = (run.folder / path).resolve()
        inside = file.is_relative_to(run.folder.resolve()) and file.is_file()
    except (OSError, ValueError):  # a NUL, or a name that is too long
        raise Refusal(400, f"{path[:80]!r} is not a path.") from None
    is_report = file == run.folder.resolve() / REPORT_FILE
    if not inside or not (is_report or file.suffix.lower() in SHOWN):
        raise Refusal(404, f"There is no preview {path!r}.")
    return FileResponse(file, headers=SANDBOX_WITH_CLIPS if is_report else None)


def head(run: Run) -> dict[str, Any]:
    """What the head of a run shows."""
    status, facts, notices = run.status(), list[tuple[str, str]](), list[str]()
    with suppress(OSError, UserError):  # the state says why
        columns, damage = record_in(run.folder).read()
        facts, notices = list(key_figures(status, columns)), [*run.judge()[2].notices, damage]
    shown = [text for text in notices if text and text not in status["message"]]
    return {"status": status, "facts": facts, "notices": shown, "has_report": (run.folder / REPORT_FILE).is_file()}


def key_figures(status: Mapping[str, Any], metrics: Columns) -> Iterator[tuple[str, str]]:
    """Key figures, as (name, text)."""
    progress = status["progress"]
    total = f" of {progress['total']:,}" if progress["total"] else ""
    yield "Step", f"{progress['current']:,}{total}"
    if progress["eta_seconds"] is not None:
        yield "Time left", clock(progress["eta_seconds"])
    for name, key, memory, worded in (
        ("Loss, smoothed", "train_loss", 0.98, "{:.4g}".format),
        ("Speed", "seconds", 0.9, pace_text),
        ("Learning rate", "learning_rate", 0.0, "{:.3g}".format),
        ("Peak memory", "peak_memory_gb", 0.0, "{:.2f} GB".format),
    ):
        mean, points = RunningMean(memory), metrics.points(key, newest=500)
        for _, value in points:
            mean.add(value)
        if points and points[-1][0] == metrics.steps[-1]:
            yield name, worded(mean.value)
    if hours := hours_of(metrics):
        yield "Time in steps", clock(hours[-1][1] * 3600)


def curves(run: Run) -> dict[str, Any]:
    """What the curves of a run show."""
    columns = run.metrics
    with _drawing:
        charts, hours = charts_of(columns), hours_of(columns)
    return {"charts": charts, "chart_data": {"charts": [chart.to_json() for chart in charts], "hours": hours}}


def previews(run: Run) -> dict[str, Any]:
    """The previews of a run; those that are being sampled come with their progress."""
    state, _, story = run.judge()
    grid = build_grid(read_media(run.folder / MEDIA_FILE), run.folder, lambda record: address(run, record.path))
    unfinished = story.growing.values() if state == "running" else ()
    growing = [(each, address(run, each.path)) for each in unfinished]
    return {"grid": grid, "left_out": left_out(grid), "growing": growing}


def address(run: Run, path: str) -> str:
    """Where the page finds a preview; empty if the file is gone. A file that is rendered again gets another address."""
    file = run.folder / path
    return f"/media/{run.id}/{quote(path)}?{file.stat().st_mtime_ns}" if file.is_file() else ""


def log(run: Run) -> dict[str, Any]:
    """The end of a run's console output, else what its events said."""
    said = (f"{event.get('timestamp')!s:.19}  {event['message']}" for event in run.recent if event.get("message"))
    lines = run.console.splitlines() or list(said)
    return {"lines": lines[-LOG_LINES:]}


VALUES: Mapping[str, Callable[[Run], dict[str, Any]]] = {
    "head": head, "curves": curves, "previews": previews, "log": log
}  # fmt: skip
