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
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from simpletuner.annexes.page import docs
from simpletuner.annexes.page.guard import OWN_USER, Access, End, Guard, is_own_user
from simpletuner.annexes.page.new import cards, drop, start_card
from simpletuner.annexes.page.parts import reason_for
from simpletuner.annexes.page.project import UPLOADS, Project, Refusal, read_object
from simpletuner.annexes.page.runs import (
    archiving,
    chosen_file,
    comparing,
    control,
    jobs,
    live,
    planned,
    results,
    run_comparison,
    run_list,
    table,
)
from simpletuner.annexes.page.runs.control import Runs
from simpletuner.annexes.page.runs.queue import Queue
from simpletuner.annexes.page.runs.runner import Runner
from simpletuner.annexes.page.settings import (
    captioning,
    datasets,
    files,
    form,
    library,
    library_view,
    prompts,
)
from simpletuner.annexes.page.speaking import Speaking
from simpletuner.annexes.report.html import FOLDER as REPORT
from simpletuner.errors import ConfigError, DiskFullError, UserError, reached_limit
from simpletuner.reporting.events import EventStream

# Served routes: the page (trainer), events of remote runs (callback), or both (unified).
Mode = Literal["unified", "trainer", "callback"]
# A client that does not complete the head of a request is dropped after once to twice this time.
HEAD_SECONDS = 10.0
# How long a shutdown waits for open streams and requests.
SHUTDOWN_SECONDS = 1
UNCOMPRESSED = (*DEFAULT_EXCLUDED_CONTENT_TYPES, chosen_file.BINARY)


def health(request: Request) -> Response:
    """Health check."""
    return JSONResponse({"status": "ok", "version": version("simpletuner")})


def json_route(
    path: str, handle: Callable[[Request, dict[str, Any]], Response], method: str = "POST"
) -> Route:
    """A route to a function of a request and the JSON object in its body, called in a thread."""

    async def endpoint(request: Request) -> Response:
        body = await read_object(request)
        return await run_in_threadpool(handle, request, body)

    return Route(path, endpoint, methods=[method])


def report_file_route(name: str) -> Route:
    """A route to a static file of the HTML report, which the page uses too."""
    return Route(f"/static/{name}", lambda request: FileResponse(REPORT / name))


HEALTH_ROUTES = [Route("/health", health), Route("/api/metrics/health/live", health)]
CALLBACK_ROUTES = [json_route("/callback", live.post_event)]
PAGE_ROUTES = [
    Route("/", form.page),
    Route("/settings", form.settings),
    Route("/new", start_card.show_new),
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
    json_route("/api/configs/{name:path}", files.put_config, "PUT"),
    Route("/api/datasets/plan", files.datasets),
    json_route("/api/datasets/plan", files.put_datasets, "PUT"),
    Route("/prompts", prompts.show_prompts),
    json_route("/api/prompts", prompts.put_prompts, "PUT"),
    Route("/api/datasets/browse", files.browse),
    json_route("/api/training/validate", files.validate),
    json_route("/api/configuration/check", files.validate),
    Route("/api/plan", control.plan_unsaved, methods=["POST"]),
    Route("/cards", cards.show_cards),
    json_route("/api/cards/begin", cards.begin),
    json_route("/api/start/look", start_card.look),
    Route("/api/start/plan", start_card.plan_proposed, methods=["POST"]),
    json_route("/api/start/write", start_card.write),
    json_route("/api/drop/files", drop.show_drop),
    json_route("/api/drop/out", drop.put_out),
    json_route("/api/drop/caption", drop.put_words, "PUT"),
    json_route("/api/drop/discard", drop.discard),
    json_route("/api/uploads", start_card.new_folder),
    Route(f"{UPLOADS}{{name}}/{{file:path}}", start_card.put_file, methods=["PUT"]),
    Route("/dataset", datasets.show_datasets),
    Route("/library", library_view.show_files),
    Route("/api/library/names", library_view.list_names),
    json_route("/api/library/files", library_view.list_captions),
    Route("/library/thumbnail", library.send_thumbnail),
    Route("/library/media", library.send_original),
    json_route("/api/library/caption", library.put_caption, "PUT"),
    json_route("/api/library/excluded", library.put_excluded, "PUT"),
    json_route("/api/library/mask", library.put_mask, "PUT"),
    json_route("/api/library/edit", library.edit),
    Route("/api/library/describe", captioning.captioning_state),
    json_route("/api/library/describe", captioning.start_captioning),
    json_route("/api/library/models", captioning.list_models),
    Route("/api/training/status", live.get_status),
    json_route("/api/training/start", live.post_start),
    json_route("/api/training/new", live.post_new_run),
    *(json_route(path, partial(live.post_button, act)) for path, act in live.BUTTONS.items()),
    Route("/api/training/queue", jobs.add, methods=["POST"]),
    json_route("/api/training/render", jobs.add_rendering),
    json_route("/api/training/queue/move", jobs.move),
    json_route("/api/training/queue/again", jobs.requeue),
    json_route("/api/training/queue/remove", jobs.remove),
    Route("/queue", jobs.show_queue),
    Route("/api/training/events", live.get_events),
    Route("/api/events/recent", live.get_recent_events),
    Route("/api/metrics/training/runs", live.get_statuses),
    Route("/api/metrics/training/runs/{run}", live.get_metrics),
    Route("/media/{run}/{path:path}", live.get_media),
    Route("/report/{run}", live.get_report),
    Route("/docs/{path:path}", docs.show),
    Route("/runs", run_list.get_list),
    Route("/compare", run_comparison.show_comparison),
    Route("/runs/{run}/contents", archiving.show_contents),
    json_route("/api/runs/archive", archiving.post_archive),
    json_route("/api/runs/bring-back", archiving.post_bring_back),
    json_route("/api/runs/delete", archiving.post_delete),
    *(Route(f"/runs/{{run}}/{name}", show) for name, show in results.VIEWS.items()),
    Route("/runs/{run}/advice", live.get_advice),
    *(Route(f"/runs/{{run}}/{name}", show) for name, show in table.TABLE_VIEWS.items()),
    Route("/runs/{run}/use", chosen_file.show_use),
    Route("/download/{run}", chosen_file.send_file),
    json_route("/api/training/estimate", comparing.post_estimate),
    json_route("/api/training/star", table.post_star),
    Route("/runs/{run}/head", live.get_head),
    Route("/runs/{run}/planned", planned.show_planned),
    Route("/runs/{run}/{part}", live.get_part),
    *map(report_file_route, ("page.css", "comparison.css", "curves.js", "viewer.js")),
    Mount("/static", StaticFiles(directory=Path(__file__).parent / "static")),
]


def create_app(
    project: Project, mode: Mode = "unified", over: threading.Event | None = None
) -> Starlette:
    """The application that serves a project, without the guard.

    Args:
        over: event streams end once it is set.
    """
    routes: list[BaseRoute] = [*HEALTH_ROUTES]
    if mode != "trainer":
        routes += CALLBACK_ROUTES
    if mode != "callback":
        routes += PAGE_ROUTES
    serves_queue = project.run is None and mode != "callback"
    # Does not compress pictures, clips, weights, ranges and event streams. Level 6 of 9
    # compresses the form in a third of the time, to a size 4 % larger.
    gzip = Middleware(GZipMiddleware, compresslevel=9, exclude_content_types=UNCOMPRESSED)
    app = Starlette(
        routes=routes,
        middleware=[gzip, Middleware(Speaking)],
        exception_handlers={UserError: refused, OSError: refused, HTTPException: refused},
        lifespan=serving_queue if serves_queue else None,
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
    """The response to a user error, an unreadable file, or a wrong URL or method."""
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, error.detail).answer(error.headers)
    if isinstance(error, Refusal):
        return error.answer()
    if isinstance(error, OSError):
        return Refusal(422, reason_for(error)).answer()
    if isinstance(error, ConfigError):
        return Refusal(422, error.problems).answer()
    status = 507 if isinstance(error, DiskFullError) else 422
    return Refusal(status, str(error)).answer()


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket.

    Raises:
        UserError: the port is in use, or the machine does not have this address.
    """
    try:
        addresses = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)
        family, _, _, _, address = addresses[0]
        return socket.create_server(cast(tuple[str, int], address[:2]), family=family, backlog=128)
    except OSError as error:
        reason = str(error)
        if error.errno and error.errno in errno.errorcode:
            # The error's own text would repeat the address.
            reason = os.strerror(error.errno)
        raise UserError(
            f"port {port} of {host} cannot be used ({reason}); choose another with --port."
        ) from None


def guarded_app(
    project: Project, access: Access, mode: Mode, over: threading.Event | None
) -> ASGIApp:
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
    config = Config(
        # A factory, so that a process restarted by --reload can create the application.
        partial(guarded_app, project, access, mode, over),
        factory=True,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,  # uvicorn's would replace the run's log handlers
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # X-Forwarded-For can be forged
        limit_concurrency=400,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        **more,
    )
    return PageServer(config)


class PageServer(Server):
    """Aborts event streams and long requests at shutdown, without logging them."""

    _logged_limit = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self.report)
        await super().startup(sockets)

    def report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error outside a request.

        A limit of the machine is logged only once, without a traceback: asyncio reaches the limit
        of open files again for every waiting connection, thousands of times a second.
        """
        error = context.get("exception")
        limit = reached_limit(error) if error is not None else ""
        if not limit:
            loop.default_exception_handler(context)
        elif limit != self._logged_limit:
            self._logged_limit = limit
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

    last_cycle: object = None  # uvicorn's request and response at the last check

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client and self.server:
            # Cached: the lookup reads a table of all sockets, and the answer stays the same.
            look_up = cache(partial(is_own_user, self.client, cast(End, self.server)))
            self.app_state = {**self.app_state, OWN_USER: look_up}
        self.loop.call_later(HEAD_SECONDS, self.drop_if_silent)

    def drop_if_silent(self) -> None:
        """Close the connection if it has waited since the last call for the same request."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.cycle is self.last_cycle:
            self.transport.close()
        self.last_cycle = self.cycle
        self.loop.call_later(HEAD_SECONDS, self.drop_if_silent)


@contextmanager
def page_of_run(
    listener: socket.socket, access: Access, output_dir: Path, events: EventStream
) -> Iterator[None]:
    """Serve the page of a run from a thread of its process, within a context."""
    folder = output_dir.resolve()
    project = Project(Path.cwd().resolve(), roots=(folder,), run=folder)
    over = threading.Event()
    server = make_server(project, access, "trainer", over)
    # Outside the main thread, uvicorn does not handle signals.
    thread = threading.Thread(target=server.run, args=([listener],), name="page", daemon=True)
    thread.start()
    port = listener.getsockname()[1]
    hint = ""
    if access.needs_token(listener):
        hint = f"/?token=TOKEN with the token in {access.source}"
    events.notify(f"Page: http://localhost:{port}{hint}")
    try:
        yield
    finally:
        over.set()
        # Open browsers receive the end of the run before the port closes.
        deadline = time.monotonic() + SHUTDOWN_SECONDS
        while server.server_state.tasks and time.monotonic() < deadline:
            time.sleep(0.02)
        server.should_exit = True
        # With a timeout: a hanging request must not keep the run from ending.
        thread.join(2 * SHUTDOWN_SECONDS)
