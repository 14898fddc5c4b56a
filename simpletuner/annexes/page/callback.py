"""POST /callback: webhook events of runs elsewhere, kept in a file of bounded size."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from simpletuner.annexes.page.project import Refusal, project_of, read_object
from simpletuner.atomic import writing_to
from simpletuner.errors import WriteError
from simpletuner.redaction import redact

FILE = "callback_events.jsonl"
LARGEST_FILE = 16 * 2**20  # the one before it is kept, too
_writing = threading.Lock()


def routes() -> list[Route]:
    """The route of the events."""
    return [Route("/callback", receive_event, methods=["POST"])]


async def receive_event(request: Request) -> Response:
    """Keep an event; `type` and `job_id` tell what happened where."""
    event = await read_object(request)
    if not isinstance(event.get("type"), str):
        raise Refusal(422, "This is no event: it has no type.")
    await run_in_threadpool(keep, project_of(request).folder / FILE, event)
    return JSONResponse({"status": "ok"}, 202)


def keep(file: Path, event: dict[str, Any]) -> None:
    """Append an event as one line; a full file is moved aside and replaces the one before it."""
    with _writing:
        size = file.stat().st_size if file.is_file() else 0
        if size > LARGEST_FILE:
            file.replace(file.with_name(f"{file.name}.1"))
            size = 0
        try:
            with writing_to(file), file.open("a", encoding="utf-8") as stream:
                stream.write(redact(json.dumps(event, ensure_ascii=False)) + "\n")
        except WriteError:
            if file.is_file():
                os.truncate(file, size)  # half a line would spoil the next one
            raise
