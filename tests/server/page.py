"""The page, served from a thread, and a browser for it."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from uvicorn import Server

from simpletuner.server.guard import Access
from simpletuner.server.project import Project
from simpletuner.server.runs import Run
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


@contextmanager
def ending_runs(folder: Path) -> Iterator[None]:
    """Kill the processes that are at work below a folder when the block is left, also by a failed test."""
    try:
        yield
    finally:
        for path in folder.glob("*/run.lock"):
            pid = Run("", path.parent).pid
            if pid is not None and pid != os.getpid():
                os.kill(pid, signal.SIGKILL)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; the test is skipped if none is installed."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        pytest.skip("needs an installed Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
