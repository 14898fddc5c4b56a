"""Runs on the page: state, events, metrics and buttons; and events from runs on other machines."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)

from simpletuner.annexes.page.parts import draw_part
from simpletuner.annexes.page.project import SANDBOX_WITH_CLIPS, Refusal, checked_value, project_of
from simpletuner.annexes.page.runs.advice import advice_part
from simpletuner.annexes.page.runs.control import Runs, ask, cancel, resume
from simpletuner.annexes.page.runs.run_head import head, rest
from simpletuner.annexes.page.runs.run_list import listed
from simpletuner.annexes.payloads import EVENTS_FILE, append_whole, last_id
from simpletuner.annexes.report import html
from simpletuner.annexes.report.html import hours_of, thin_extremes
from simpletuner.annexes.runs.log_files import Tail
from simpletuner.annexes.runs.run import Run
from simpletuner.atomic import writing_to
from simpletuner.redaction import redact
from simpletuner.reporting.metrics import MIME, REPORT_FILE, VIDEO_MIME, parse_row

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0  # proxies close idle streams
# Points of a curve in a response: default and maximum.
POINTS = 2000
MAX_POINTS = 20_000
LOG_LINES = 300
SHOWN = {*MIME, *VIDEO_MIME, ".gif"}
CALLBACK_FILE = "callback_events.jsonl"
LARGEST_FILE = 16 * 2**20  # bytes of CALLBACK_FILE before it is rotated; one older file is kept
drawing = threading.Lock()  # drawing the curves of a long run takes 40 MB
_writing = threading.Lock()


def runs_of(request: Request) -> Runs:
    """All runs of the project."""
    return request.app.state.runs


def chosen(request: Request) -> Run:
    """The run that a request names, or else the first."""
    return runs_of(request).find(request.path_params.get("run") or request.query_params.get("run"))


def get_status(request: Request) -> Response:
    """The status of a run; by default of the first."""
    if not request.query_params.get("run") and not runs_of(request).all():
        return JSONResponse({"status": "idle", "run": None})
    return JSONResponse(chosen(request).status())


def get_statuses(request: Request) -> Response:
    """The status of all runs."""
    return JSONResponse([run.status() for run in runs_of(request).all()])


def post_start(request: Request, body: dict[str, Any]) -> Response:
    """Start a config, `{"config": NAME, "settings": {...}}`, or restart a run, `{"run": ID}`."""
    config, settings = training_in(request, body)
    run = runs_of(request).start(config, settings)
    return JSONResponse({"run": run.id}, 202)


def training_in(request: Request, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The config and the further settings in a request to train; of a run, those of its start."""
    runs = runs_of(request)
    settings = checked_value({"settings": {}, **body}, "settings", dict)
    if "run" not in body:
        return str(body.get("config", "config")), settings
    run = runs.find(str(body["run"]))
    return run.config, runs.settings_of(run, settings)


def post_new_run(request: Request, body: dict[str, Any]) -> Response:
    """Write a config that starts from the LoRA of a run: `{"run": ID, "name": NAME}`.

    The answer says which settings were left out.
    """
    runs = runs_of(request)
    run = runs.find(str(body.get("run", "")))
    name = str(body.get("name", ""))
    left_out = runs.renew(run, name)
    return JSONResponse({"config": name, "left_out": left_out}, 201)


def post_button(act: Callable[[Run], None], request: Request, body: dict[str, Any]) -> Response:
    """Perform the action of a button: `{"run": ID}`."""
    run = runs_of(request).find(str(body.get("run") or ""))
    act(run)
    return JSONResponse({"run": run.id}, 202)


BUTTONS: Mapping[str, Callable[[Run], None]] = {
    "/api/training/stop": lambda run: ask(run, "stop"),
    "/api/training/stop_at_epoch_end": lambda run: ask(run, "stop_at_epoch_end"),
    "/api/training/validation/run": lambda run: ask(run, "preview"),
    "/api/training/checkpoint/run": lambda run: ask(run, "save"),
    "/api/training/cancel": cancel,
    "/api/training/resume": resume,
}


async def get_events(request: Request) -> Response:
    """Stream the events of a run."""
    run = await run_in_threadpool(chosen, request)
    path = run.folder / EVENTS_FILE
    newest = await run_in_threadpool(last_id, path)
    after = newest
    # A browser that reconnects sends the id of the last event it received.
    received = request.headers.get("last-event-id", "")
    if received.isdecimal():
        after = int(received[:18])
        if after > newest:  # of an earlier run in this folder
            after = 0
    last_parts = partial(parts_at_end, runs_of(request), run)
    stream = event_stream(path, after, request.app.state.over, last_parts)
    headers = {"Cache-Control": "no-store"}
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


def parts_at_end(runs: Runs, run: Run) -> dict[str, str]:
    """The HTML parts that show how a run ended; previews could no longer be loaded."""
    return {
        "list": listed(runs),
        "head": drawn(run, "head"),
        "advice": advice_part(run),
        "log": drawn(run, "log"),
    }


async def event_stream(
    path: Path, after: int, over: threading.Event, last_parts: Callable[[], dict[str, str]]
) -> AsyncIterator[str]:
    """Server-sent events, until the client disconnects or the run is over.

    Args:
        path: the log of events.
        after: the id of the event after which the stream begins.
        over: is set before the port closes; then the stream ends.
        last_parts: draws what the final event contains, since nothing can be requested later.
    """
    tail = Tail(path, "id")
    yield ": connected\n\n"
    sent_at = time.monotonic()
    lines: list[bytes] = []
    is_over = False
    # Reads once more after `over` is set, for events written before.
    while lines or not is_over:
        is_over = over.is_set()
        # A part at a time, so that a slow client does not fill memory.
        lines = await run_in_threadpool(tail.lines)
        if not lines:
            after = 0  # what follows is new, also the small ids of another run
        for event in events_after(lines, after):
            sent_at = time.monotonic()
            yield f"id: {event['id']}\nevent: {event.get('type')}\ndata: {json.dumps(event)}\n\n"
        if time.monotonic() - sent_at > HEARTBEAT_SECONDS:
            sent_at = time.monotonic()
            yield ": alive\n\n"
        await asyncio.sleep(0 if lines else POLL_SECONDS)
    parts = await run_in_threadpool(last_parts)
    yield f"event: end\ndata: {json.dumps(parts)}\n\n"


def events_after(lines: Sequence[bytes], after: int) -> Iterator[dict[str, Any]]:
    """The events in lines of a log whose ids are above `after`."""
    if not lines:
        return
    last = parse_row(lines[-1], "id")
    if last is not None and last["id"] <= after:
        return  # ids grow, so the other lines need not be parsed
    for line in lines:
        event = parse_row(line, "id")
        if event and event["id"] > after:
            yield event


def get_recent_events(request: Request) -> Response:
    """The newest events of a run."""
    return JSONResponse(chosen(request).recent)


def get_metrics(request: Request) -> Response:
    """The curves of a run as numbers: `?metric=NAME&max_points=N`.

    Longer curves are thinned to the extremes of intervals.
    """
    run = chosen(request)
    columns = run.metrics
    count = POINTS
    limit = request.query_params.get("max_points", "")
    if limit.isdecimal():
        count = max(2, min(int(limit[:18]), MAX_POINTS))
    with drawing:
        names = request.query_params.getlist("metric") or columns.names
        curves = {name: thin_extremes(columns.points(name), count) for name in names}
        not_empty = {name: points for name, points in curves.items() if points}
        return JSONResponse({"run": run.id, "metrics": not_empty, "hours": hours_of(columns)})


def get_media(request: Request) -> Response:
    """A picture, clip or the report of a run, with support for ranges, which players need.

    Raises:
        Refusal: 404 for other files, or files outside the folder; 400 if the path is invalid.
    """
    folder = chosen(request).folder.resolve()
    path = request.path_params["path"]
    try:
        file = (folder / path).resolve()
        is_inside = file.is_relative_to(folder) and file.is_file()
    except (OSError, ValueError):  # a NUL, or a name that is too long
        raise Refusal(400, f"{path[:80]!r} is not a path.") from None
    is_report = file == folder / REPORT_FILE
    if not is_inside or not (is_report or file.suffix.lower() in SHOWN):
        raise Refusal(404, f"There is no preview {path!r}.")
    return FileResponse(file, headers=SANDBOX_WITH_CLIPS if is_report else None)


def get_report(request: Request) -> Response:
    """Redirect to the HTML report, at a URL where its relative links work."""
    return RedirectResponse(f"/media/{chosen(request).id}/{REPORT_FILE}")


def get_head(request: Request) -> Response:
    """The head of a run's view, as HTML."""
    run = chosen(request)
    busy = ""
    if run.may_start and run.pid is None:
        # Another run at work: one that is started now would compete with it for the device.
        busy = Path(request.app.state.runner.busy_folder()).name
    return HTMLResponse(drawn(run, "head", busy))


def get_part(request: Request) -> Response:
    """A part of a run's view, as HTML."""
    name = request.path_params["part"]
    if name not in PARTS:
        raise Refusal(404, f"A run has no part {name!r}.")
    return HTMLResponse(drawn(chosen(request), name))


def get_advice(request: Request) -> Response:
    """What to do next with a run."""
    return HTMLResponse(advice_part(chosen(request)))


def drawn(run: Run, part: str, busy: str = "") -> str:
    """The head or the log of a run's view, as HTML.

    Args:
        busy: the name of another run that is at work.
    """
    title, values_of = PARTS[part]

    def draw() -> str:
        values = {"busy": busy, **values_of(run)}
        return html.render("page/runs/run_parts.html.jinja", part=part, run=run, **values)

    return draw_part(title, draw)


def log(run: Run) -> dict[str, Any]:
    """What happened in a run, and the end of its console output or else of its events."""
    lines = run.console.splitlines()
    if not lines:
        lines = [
            f"{event.get('timestamp')!s:.19}  {event['message']}"  # up to the second
            for event in run.recent
            if event.get("message")
        ]
    return {"lines": lines[-LOG_LINES:], **rest(run)}


# Titles and template values of the parts.
PARTS: Mapping[str, tuple[str, Callable[[Run], dict[str, Any]]]] = {
    "head": ("Run", head),
    "log": ("Log", log),
}


def post_event(request: Request, event: dict[str, Any]) -> Response:
    """Append an event of a run on another machine as one line.

    A full file is renamed; it replaces the one before it.
    """
    if not isinstance(event.get("type"), str):
        raise Refusal(422, "This is not an event: it has no type.")
    file = project_of(request).folder / CALLBACK_FILE
    with _writing:
        if file.is_file() and file.stat().st_size > LARGEST_FILE:
            file.replace(file.with_name(f"{file.name}.1"))
        line = redact(json.dumps(event, ensure_ascii=False)) + "\n"
        with writing_to(file):
            append_whole(file, line.encode())
    return JSONResponse({"status": "ok"}, 202)
