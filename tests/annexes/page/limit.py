"""A limit of time for a test, also while it waits for a browser that never answers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psutil

SECONDS = 60
GRACE = 5  # seconds until the test is interrupted, if the end of the browser did not end its wait
BROWSER = "chrom"  # in the names of Chromium's processes


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Raise in whatever waits after some seconds; does nothing outside the main thread, where
    signals cannot be used.

    A wait of Playwright, such as `evaluate`, has no limit of its own. It fails at once when the
    browser is killed; an exception in the middle of it would leave Playwright waiting for ever when
    the browser is closed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        if kill_browsers():
            signal.setitimer(signal.ITIMER_REAL, GRACE)
            return
        raise TimeoutError(f"The test took more than {seconds:g} s.")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def kill_browsers() -> bool:
    """Kill the browsers that this process has started; returns whether there was one."""
    browsers = [
        process for process in psutil.Process().children(recursive=True) if _is_browser(process)
    ]
    for browser in browsers:
        with suppress(psutil.NoSuchProcess):
            browser.kill()
    return bool(browsers)


def _is_browser(process: psutil.Process) -> bool:
    try:
        return BROWSER in process.name() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
