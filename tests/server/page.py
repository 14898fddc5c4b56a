"""The page, served from a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from uvicorn import Server

from simpletuner.server.guard import Access
from simpletuner.server.project import Project
from simpletuner.server.serve import listen, make_server


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, Server]]:
    """The page of a project: its port and its server."""
    listener = listen("127.0.0.1", 0)
    server = make_server(Project(folder), Access())
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(10)
