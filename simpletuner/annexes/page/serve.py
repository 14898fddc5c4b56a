"""The web page on port 8001: routes, and the server, which runs in a process or a thread."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

import h11
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from simpletuner.annexes.page import (
    captioning,
    control,
    datasets,
    docs,
    files,
    form,
    jobs,
    library,
    live,
    results,
    start_card,
)
from simpletuner.annexes.page.control import Runs
from simpletuner.annexes.page.guard import OWN_USER, Access, End, Guard, is_own_user
from simpletuner.annexes.page.parts import reason_for
from simpletuner.annexes.page.project import UPLOADS, Project, Refusal, read_object
from simpletuner.annexes.page.queue import Queue
from simpletuner.annexes.page.runner import Runner
from simpletuner.annexes.report.html import FOLDER as REPORT
from simpletuner.errors import ConfigError, DiskFullError, UserError, reached_limit
from simpletuner.reporting.events import EventStream

# Served routes: the page (trainer), events of remote runs (callback), or both (unified).
Mode = Literal["unified", "trainer", "callback"]
# A client that does not complete the head of a request is dropped after once to twice this time.
HEAD_SECONDS = 10.0
END_SECONDS = 1
UNCOMPRESSED = (*DEFAULT_EXCLUDED_CONTENT_TYPES, results.AS_IT_IS)


def health(request: Request) -> Response:
    """Health check."""
    return JSONResponse({"status": "ok", "version": version("simpletuner")})


def taking(
    path: str, act: Callable[[Request, dict[str, Any]], Response], method: str = "POST"
) -> Route:
    """A route to a function of a request and the JSON object in its body; the function runs in a
    thread.
    """

    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(act, request, await read_object(request))

    return Route(path, endpoint, methods=[method])


def shared(name: str) -> Route:
    """A route to a static file of the HTML report."""
    return Route(f"/static/{name}", lambda request: FileResponse(REPORT / name))


ALWAYS = [Route("/health", health), Route("/api/metrics/health/live", health)]
ELSEWHERE = [taking("/callback", live.post_event)]
PAGE = [
    Route("/", form.page),
    Route("/tabs/{tab}", form.tab),
    Route("/api/fields/tabs", form.field_tabs),
    Route("/api/fields/metadata", form.field_metadata),
    Route("/api/models", form.models),
    Route("/api/models/{family}/flavours", form.family_flavours),
    Route("/api/hardware/gpus", form.gpus),
    Route("/api/hardware/memory", form.memory),
    Route("/api/configs/", files.configs),
    Route("/api/configs/examples", files.examples),
    Route("/api/configs/{name:path}", files.config),
    taking("/api/configs/{name:path}", files.put_config, "PUT"),
    Route("/api/datasets/plan", files.datasets),
    taking("/api/datasets/plan", files.put_datasets, "PUT"),
    Route("/api/datasets/browse", files.browse),
    taking("/api/training/validate", files.validate),
    taking("/api/configuration/check", files.validate),
    Route("/api/plan", control.plan_unsaved, methods=["POST"]),
    taking("/api/start/look", start_card.look),
    taking("/api/start/write", start_card.write),
    taking("/api/uploads", start_card.new_folder),
    Route(f"{UPLOADS}{{name}}/{{file:path}}", start_card.put_file, methods=["PUT"]),
    Route("/dataset", datasets.show_datasets),
    Route("/library", library.show_files),
    Route("/library/thumbnail", library.send_thumbnail),
    Route("/library/media", library.send_original),
    taking("/api/library/caption", library.put_caption, "PUT"),
    taking("/api/library/excluded", library.put_excluded, "PUT"),
    taking("/api/library/mask", library.put_mask, "PUT"),
    taking("/api/library/edit", library.edit),
    Route("/api/library/describe", captioning.captioning_state),
    taking("/api/library/describe", captioning.start_captioning),
    Route("/api/training/status", live.get_status),
    taking("/api/training/start", live.post_start),
    taking("/api/training/new", live.post_new_run),
    *(taking(path, partial(live.post_button, act)) for path, act in live.BUTTONS.items()),
    taking("/api/training/queue", jobs.add),
    taking("/api/training/render", jobs.add_rendering),
    taking("/api/training/queue/move", jobs.move),
    taking("/api/training/queue/again", jobs.again),
    taking("/api/training/queue/remove", jobs.remove),
    Route("/queue", jobs.show_queue),
    Route("/api/training/events", live.get_events),
    Route("/api/events/recent", live.get_recent_events),
    Route("/api/metrics/training/runs", live.get_statuses),
    Route("/api/metrics/training/runs/{run}", live.get_metrics),
    Route("/media/{run}/{path:path}", live.get_media),
    Route("/report/{run}", live.get_report),
    Route("/docs/{path:path}", docs.show),
    Route("/runs", live.get_list),
    *(Route(f"/runs/{{run}}/{name}", act) for name, act in results.VIEWS.items()),
    Route("/download/{run}", results.send_lora),
    Route("/runs/{run}/{part}", live.get_part),
    *map(shared, ("page.css", "curves.js", "viewer.js")),
    Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
]


def create_app(
    project: Project, mode: Mode = "unified", over: threading.Event | None = None
) -> Starlette:
    """The application that serves a project, without the guard; event streams end once `over` is
    set.
    """
    app = Starlette(
        routes=[
            *ALWAYS,
            *(ELSEWHERE if mode != "trainer" else []),
            *(PAGE if mode != "callback" else []),
        ],
        # Does not compress pictures, clips, weights, ranges and event streams. Level 6 of 9
        # compresses the form in a third of the time, to a size 4 % larger.
        middleware=[
            Middleware(GZipMiddleware, compresslevel=9, exclude_content_types=UNCOMPRESSED)
        ],
        exception_handlers={UserError: refused, OSError: refused, HTTPException: refused},
        lifespan=serving_queue if project.run is None and mode != "callback" else None,
    )
    app.state.runs = Runs(project)
    app.state.over = over or threading.Event()
    app.state.runner = Runner(Queue(project.folder), app.state.runs)
    return app


@asynccontextmanager
async def serving_queue(app: Starlette) -> AsyncIterator[None]:
    """Start queued jobs from a thread while the server runs."""
    over = threading.Event()
    threading.Thread(target=app.state.runner.serve, args=(over,), name="queue", daemon=True).start()
    yield
    over.set()


def refused(request: Request, error: Exception) -> Response:
    """The response to a `Refusal`, to another user error, to an unreadable file, and to wrong URLs
    and methods.
    """
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, error.detail).answer(error.headers)
    if isinstance(error, OSError):
        error = UserError(reason_for(error))
    if not isinstance(error, Refusal):
        status = 507 if isinstance(error, DiskFullError) else 422
        error = Refusal(status, error.problems if isinstance(error, ConfigError) else str(error))
    return error.answer()


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        UserError: the port is in use, or the machine does not have this address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[
            0
        ]
        return socket.create_server(cast(tuple[str, int], address[:2]), family=family, backlog=128)
    except OSError as error:
        # The error's text would repeat the address.
        reason = (
            os.strerror(error.errno)
            if error.errno and error.errno in errno.errorcode
            else str(error)
        )
        raise UserError(
            f"port {port} of {host} cannot be used ({reason}); choose another with --port."
        ) from None


def guarded(project: Project, access: Access, mode: Mode, over: threading.Event | None) -> ASGIApp:
    """The application behind its guard."""
    return Guard(create_app(project, mode, over), access)


def make_server(
    project: Project,
    access: Access,
    mode: Mode = "unified",
    over: threading.Event | None = None,
    /,
    **more: Any,
) -> PageServer:
    """A server, not yet running; `more` are options of uvicorn."""
    # A factory, so that a process restarted by --reload can create the application.
    config = Config(
        partial(guarded, project, access, mode, over),
        factory=True,
        http=Connection,
        ws="none",
        lifespan="on",
        # uvicorn's config would replace the run's log handlers.
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        # X-Forwarded-For can be forged.
        proxy_headers=False,
        limit_concurrency=400,
        timeout_graceful_shutdown=END_SECONDS,
        **more,
    )
    return PageServer(config)


class PageServer(Server):
    """Aborts event streams and long requests at shutdown, without logging them; logs a limit of
    open files once.
    """

    _limit = ""  # that was logged

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self.report)
        await super().startup(sockets)

    def report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error outside a request, but a limit of the machine only once and without its
        traceback.

        asyncio meets a limit of open files again for every connection that waits, thousands of
        times a second.
        """
        error = context.get("exception")
        limit = reached_limit(error) if error is not None else ""
        if not limit:
            loop.default_exception_handler(context)
        elif limit != self._limit:
            self._limit = limit
            logging.getLogger(__name__).warning("Connections wait: %s", limit)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").disabled = True
        for connection in list(self.server_state.connections):
            # `close` would first wait for slow clients to read buffered data.
            cast(H11Protocol, connection).transport.abort()
        await asyncio.sleep(0)  # lets streams detect the disconnect
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """Looks up the user of a connection, and drops clients that send nothing or trickle bytes."""

    last: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client and self.server:
            ends = self.client, cast(End, self.server)
            self.app_state = {**self.app_state, OWN_USER: cache(partial(is_own_user, *ends))}
        self.loop.call_later(HEAD_SECONDS, self.drop_if_silent)

    def drop_if_silent(self) -> None:
        """Close the connection if it is still waiting for the head of the same request as at the
        last call.
        """
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.cycle is self.last:
            self.transport.close()
        self.last = self.cycle
        self.loop.call_later(HEAD_SECONDS, self.drop_if_silent)


@contextmanager
def page_of_run(
    listener: socket.socket, access: Access, output_dir: Path, events: EventStream
) -> Iterator[None]:
    """Serve the page of a run from a thread of its process, within a context."""
    project = Project(Path.cwd().resolve(), (output_dir.resolve(),), run=output_dir.resolve())
    over = threading.Event()
    server = make_server(project, access, "trainer", over)
    # Outside the main thread, uvicorn does not handle signals.
    thread = threading.Thread(target=server.run, args=([listener],), name="page", daemon=True)
    thread.start()
    hint = (
        f"/?token=TOKEN with the token in {access.source}" if access.needs_token(listener) else ""
    )
    events.say(f"Page: http://localhost:{listener.getsockname()[1]}{hint}")
    try:
        yield
    finally:
        over.set()
        # Open browsers receive the end of the run before the port closes.
        deadline = time.monotonic() + END_SECONDS
        while server.server_state.tasks and time.monotonic() < deadline:
            time.sleep(0.02)
        server.should_exit = True
        # With a timeout: a hanging request must not keep the run from ending.
        thread.join(2 * END_SECONDS)
