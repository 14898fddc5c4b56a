"""The page, served from a thread, and a browser for it."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uvicorn import Server

from simpletuner.annexes.page.guard import Access
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.serve import listen, make_server
from simpletuner.annexes.runs.run import Run
from tests.tools.processes import PATIENCE


@contextmanager
def serving(folder: Path, access: Access = Access(), port: int = 0) -> Iterator[tuple[int, Server]]:
    """The page of a project: its port and its server."""
    listener = listen("127.0.0.1", port)
    server = make_server(Project(folder), access)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@contextmanager
def ending_runs(folder: Path) -> Iterator[None]:
    """Kill the processes that are at work below a folder when the block is left, also by a failed
    test.
    """
    try:
        yield
    finally:
        for path in folder.glob("*/run.lock"):
            pid = Run("", path.parent).pid
            if pid is not None and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


@contextmanager
def tab(browser: Any) -> Iterator[Any]:
    """A new page of the browser, as of a user who was never here."""
    page = browser.new_page()
    try:
        yield page
    finally:
        page.close()
        browser.clear_cookies()


@contextmanager
def opened(browser: Any, folder: Path, anchor: str = "") -> Iterator[Any]:
    """The page of a project in a browser; an error of a script or a request to elsewhere fails the
    test.
    """
    complaints: list[str] = []
    with serving(folder) as (port, _), tab(browser) as page:
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda request: None if f":{port}/" in request.url else complaints.append(request.url),
        )
        page.goto(f"http://127.0.0.1:{port}/{anchor}")
        yield page
    assert complaints == [], complaints


def go(page: Any, place: str) -> None:
    """Open a place of the page by its link in the header: New, Settings or Runs."""
    page.get_by_role("navigation", name="Places").get_by_role("link", name=place).click()


def open_part(page: Any, part: str) -> None:
    """Open a part of Settings, such as Training, with all its sections."""
    parts_of_settings(page).get_by_role("link", name=re.compile(f"^{part}")).click()


def parts_of_settings(page: Any) -> Any:
    """The links to the parts of Settings, with their numbers of problems."""
    return page.get_by_role("navigation", name="Parts of the settings")
