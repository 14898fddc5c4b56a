"""The server process or thread: it takes a port, serves, and ends at once when asked to. Free of torch."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import h11
from starlette.types import ASGIApp
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from simpletuner.annexes.page.app import Mode, create_app
from simpletuner.annexes.page.guard import OWN_USER, Access, Guard
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.visitor import End, can_tell_users, is_own_user
from simpletuner.errors import UserError
from simpletuner.reporting.events import EventStream

# A client that has not completed the head of a request after this is dropped within the same time again.
HEAD_SECONDS = 10.0
MOST_CONNECTIONS = 400
END_SECONDS = 1


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections.

    Raises:
        UserError: the port is taken, or the machine does not have this address.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(cast(tuple[str, int], address[:2]), family=family, backlog=128)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"port {port} of {host} cannot be used ({reason}); choose another with --port.") from None


def guarded(project: Project, access: Access, mode: Mode = "unified") -> ASGIApp:
    """The application behind its guard."""
    return Guard(create_app(project, mode), access)


def make_server(project: Project, access: Access, mode: Mode = "unified", **more: Any) -> Server:
    """A server, not yet running; `more` are options of uvicorn."""
    # A factory, which a process that is started anew after a change (--reload) can make for itself.
    config = Config(
        partial(guarded, project, access, mode),
        factory=True,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=END_SECONDS,
        **more,
    )
    return PageServer(config)


class PageServer(Server):
    """Ends streams of events and long requests when it is asked to end, without reports of each."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").disabled = True
        for connection in list(self.server_state.connections):
            cast(H11Protocol, connection).transport.abort()
        await asyncio.sleep(0)  # streams notice that their browsers are gone
        for task in self.server_state.tasks:
            task.cancel()
        await super().shutdown(sockets)


class Connection(H11Protocol):
    """Knows whose a connection is; drops clients that connect and then say nothing, or say it a byte at a time."""

    last: object = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.client and self.server:
            ends = self.client, cast(End, self.server)
            self.app_state = {**self.app_state, OWN_USER: cache(partial(is_own_user, *ends))}
        self.loop.call_later(HEAD_SECONDS, self.drop_if_silent)

    def drop_if_silent(self) -> None:
        """Close the connection if it was waiting for the head of the same request at the last call, too."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.cycle is self.last:
            self.transport.close()
        self.last = self.cycle
        self.loop.call_later(HEAD_SECONDS, self.drop_if_silent)


@contextmanager
def page_of_run(listener: socket.socket, access: Access, output_dir: Path, events: EventStream) -> Iterator[None]:
    """Serve the page of a run from a thread of its process while the block lasts."""
    project = Project(Path.cwd().resolve(), (output_dir.resolve(),), run=output_dir.resolve())
    server = make_server(project, access, "trainer")
    thread = threading.Thread(target=server.run, args=([listener],), name="page", daemon=True)
    thread.start()
    needs_token = access.token is not None and not can_tell_users(listener)
    hint = f"/?token=TOKEN with the token in {access.source}" if needs_token else ""
    events.say(f"Page: http://localhost:{listener.getsockname()[1]}{hint}")
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(2 * END_SECONDS)
