"""Routes of runs: state, events, curves and previews, and the buttons."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from simpletuner.reporting.curves import charts_of, hours_of, points_of, thin_extremes
from simpletuner.reporting.html import left_out, render
from simpletuner.reporting.metrics import MEDIA_FILE, MIME, VIDEO_MIME, read_media
from simpletuner.reporting.pace import RunningMean, clock, pace_text
from simpletuner.reporting.payloads import EVENTS_FILE, read_events
from simpletuner.reporting.previews import build_grid
from simpletuner.reporting.report import REPORT_FILE
from simpletuner.server.control import Runs, ask, cancel
from simpletuner.server.project import SANDBOX, Refusal, read_object
from simpletuner.server.runs import Run, Tail

POLL, HEARTBEAT = 0.5, 15.0  # seconds
MAX_POINTS = 2000
LOG_LINES = 300
SHOWN = {*MIME, *VIDEO_MIME, ".gif"}
Act = Callable[[Run], None]


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
    content = event_stream(run.folder / EVENTS_FILE, int(last) if last.isdecimal() else None)
    return StreamingResponse(content, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def recent(request: Request) -> Response:
    """The newest events of a run."""
    run = chosen(request)
    run.read()
    return JSONResponse(list(run.recent))


def metrics(request: Request) -> Response:
    """The curves of a run as numbers: `?metric=NAME&max_points=N`."""
    run, asked = chosen(request), request.query_params
    rows, limit = run.read()[1], asked.get("max_points", "")
    points = decimated(rows, asked.getlist("metric"), int(limit) if limit.isdecimal() else MAX_POINTS)
    return JSONResponse({"run": run.id, "metrics": points, "hours": hours_of(rows)})


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


async def event_stream(path: Path, after: int | None) -> AsyncIterator[str]:
    """Server-sent events: those after an id (none if it is None), then every new one, until the client leaves."""
    tail = Tail(path, "id")
    tail.skip()
    new = [] if after is None else await run_in_threadpool(read_events, path, after)
    twice = {event["id"] for event in new}  # if they were written between the two looks at the file
    generation = tail.generation
    yield ": connected\n\n"
    sent_at = time.monotonic()
    while True:
        for event in new:
            sent_at = time.monotonic()
            yield f"id: {event['id']}\nevent: {event['type']}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"
        if time.monotonic() - sent_at > HEARTBEAT:
            sent_at = time.monotonic()
            yield ": alive\n\n"
        await asyncio.sleep(POLL)
        new = [event for event in tail.read() if tail.generation != generation or event["id"] not in twice]


def decimated(rows: Sequence[Mapping[str, Any]], names: Sequence[str], limit: int) -> dict[str, list[Any]]:
    """Points of the named metrics, or of all, with the extremes of each stretch."""
    wanted = names or list(dict.fromkeys(key for row in rows for key in row if key != "step"))
    curves = {name: thin_extremes(points_of(rows, name), max(2, limit)) for name in wanted}
    return {name: points for name, points in curves.items() if points}


def file_of(run: Run, path: str) -> Response:
    """A picture, clip or the report of a run; ranges are answered, which players need.

    Raises:
        Refusal: 404 if it is something else, or outside the folder.
    """
    file = (run.folder / path).resolve()
    is_report = file == run.folder.resolve() / REPORT_FILE
    inside = file.is_relative_to(run.folder.resolve()) and file.is_file()
    if not inside or not (is_report or file.suffix.lower() in SHOWN):
        raise Refusal(404, f"There is no preview {path!r}.")
    return FileResponse(file, headers=SANDBOX if is_report else None)


def head(run: Run) -> dict[str, Any]:
    """What the head of a run shows."""
    story, rows = run.read()
    status = run.status()
    notices = [each for each in story.notices if each["type"] != "error"]
    has_report = (run.folder / REPORT_FILE).is_file()
    return {"status": status, "facts": list(key_figures(status, rows)), "notices": notices, "has_report": has_report}


def key_figures(status: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
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
        mean = RunningMean(memory)
        for _, value in points_of(rows[-500:], key):
            mean.add(value)
        if rows and key in rows[-1]:
            yield name, worded(mean.value)
    if hours := hours_of(rows):
        yield "Time in steps", clock(hours[-1][1] * 3600)


def curves(run: Run) -> dict[str, Any]:
    """What the curves of a run show."""
    rows = run.read()[1]
    charts = charts_of(rows)
    return {"charts": charts, "chart_data": {"charts": [chart.to_json() for chart in charts], "hours": hours_of(rows)}}


def previews(run: Run) -> dict[str, Any]:
    """The previews of a run; those that are being sampled come with their progress."""
    story = run.read()[0]
    grid = build_grid(read_media(run.folder / MEDIA_FILE), run.folder, lambda record: address(run, record.path))
    unfinished = story.growing.values() if run.judge()[0] == "running" else ()
    growing = [(each, address(run, (each["images"] or [each["videos"][0]["src"]])[0])) for each in unfinished]
    return {"grid": grid, "left_out": left_out(grid), "growing": growing}


def address(run: Run, path: str) -> str:
    """Where the page finds a preview; empty if the file is gone. A file that is rendered again gets another address."""
    file = run.folder / path
    return f"/media/{run.id}/{quote(path)}?{file.stat().st_mtime_ns}" if file.is_file() else ""


def log(run: Run) -> dict[str, Any]:
    """The end of a run's console output, else what its events said."""
    run.read()
    said = [f"{event['timestamp'][11:19]}  {event['message']}" for event in run.recent if event.get("message")]
    lines = run.console.splitlines() or said
    return {"lines": lines[-LOG_LINES:]}


VALUES: Mapping[str, Callable[[Run], dict[str, Any]]] = {
    "head": head, "curves": curves, "previews": previews, "log": log
}  # fmt: skip
