"""Files that a browser drops: one a request, streamed into a folder of the project's `datasets`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from anyio import from_thread
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from simpletuner.annexes.page.plans import GONE
from simpletuner.annexes.page.project import Refusal, project_of
from simpletuner.annexes.start.receive import check_space, receive, safe_name
from simpletuner.annexes.start.recipe import run_name
from simpletuner.atomic import free_path, writing_to

FOLDER = Path("datasets")
IDLE_SECONDS = 30.0  # without a byte; an upload as a whole may take hours


def new_folder(request: Request, body: dict[str, Any]) -> Response:
    """Create a folder for files: `{"name": NAME}`, made safe, and numbered if there is one already."""
    wanted = project_of(request).inside(FOLDER) / run_name(Path(safe_name(str(body.get("name", ""))) or "my-files"))
    while True:
        folder = free_path(wanted)
        with writing_to(folder), suppress(FileExistsError):  # somebody else was faster
            folder.mkdir(parents=True)
            return JSONResponse({"name": folder.name, "folder": f"{FOLDER}/{folder.name}"}, 201)


async def put_file(request: Request) -> Response:
    """Save the body of a request as a file, or the files of a zip; names those that were saved or skipped."""
    folder, name = project_of(request).inside(FOLDER / request.path_params["name"]), request.path_params["file"]
    if folder.parent != project_of(request).inside(FOLDER) or not folder.is_dir():
        raise Refusal(404, f"There is no folder {FOLDER}/{request.path_params['name']}.")
    check_space(folder, int(request.headers.get("content-length", 0)))
    saved, skipped = await run_in_threadpool(receive, folder, safe_name(name), following(request))
    told = [{"file": file, "reason": reason} for file, reason in skipped.items()]
    return JSONResponse({"saved": saved, "skipped": told}, 201)


def following(request: Request) -> Iterator[bytes]:
    """The parts of a body as they arrive, for a thread.

    Raises:
        Refusal: 408 if nothing arrives for a while, 499 if the connection breaks.
    """
    stream = aiter(request.stream())

    async def next_part() -> bytes | None:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                return await anext(stream, None)
        except TimeoutError:
            raise Refusal(408, f"Nothing has arrived for {IDLE_SECONDS:g} s; nothing of the file was kept.") from None
        except ClientDisconnect:
            raise Refusal(GONE, "The connection broke.") from None

    while (part := from_thread.run(next_part)) is not None:
        yield part
