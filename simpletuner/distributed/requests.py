"""Requests to a running session, made by creating files; signals also request a stop.

touch output/requests/stop                 stop after the current step, like Ctrl-C
touch output/requests/stop_at_epoch_end    stop after the last step of the epoch
touch output/requests/save                 save a checkpoint now
touch output/requests/preview              render previews now
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal, get_args

from simpletuner.errors import Interrupted

FOLDER = "requests"
Request = Literal["stop", "stop_at_epoch_end", "save", "preview"]
REQUESTS: tuple[Request, ...] = get_args(Request)
Handler = Callable[[int, FrameType | None], None] | signal.Handlers
DEBOUNCE_SECONDS = 1.0  # a launcher passes a signal on at once; people take longer to repeat one
STOPPING = (
    "Stopping after this step. Ctrl-C again stops at once and loses everything since the last "
    "checkpoint."
)


class Stop:
    """A flag that asks this process to stop after the current step.

    Signal handlers and the watch of other processes call `request`. Sources are polled; they look
    for files.
    """

    def __init__(self, *sources: Callable[[], bool]) -> None:
        self._sources = list(sources)
        self.requested = False

    def add_source(self, source: Callable[[], bool]) -> None:
        """Add a source to poll."""
        self._sources.append(source)

    def request(self) -> None:
        """Request a stop; safe to call from any thread and from signal handlers."""
        self.requested = True  # never reset

    def is_due(self) -> bool:
        """Whether a stop was requested, directly or by a source."""
        if not self.requested and any(source() for source in self._sources):
            self.request()
        return self.requested

    def check(self) -> None:
        """Raise if a stop was requested; called where work can be interrupted.

        Raises:
            Interrupted: a stop was requested.
        """
        if self.is_due():
            raise Interrupted("A stop was requested.")


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, and survive a closed terminal (SIGHUP)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handlers: dict[int, Handler] = {signal.SIGTERM: debounced(interrupt)}
    if sys.platform != "win32":
        handlers[signal.SIGHUP] = signal.SIG_IGN
    with signal_handlers(handlers):
        yield


@contextmanager
def stop_on_interrupt(stop: Stop, announce: Callable[[], object]) -> Iterator[None]:
    """Turn the first Ctrl-C (or SIGTERM) into a request to stop; the second one interrupts.

    Args:
        announce: called in a thread when a stop is requested.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.request()
        for caught, handler in previous.items():
            # A script's background job ignores Ctrl-C by default. Since the first one had an
            # effect, the second must have one too.
            second = signal.default_int_handler if handler is signal.SIG_IGN else handler
            if caught == signal.SIGTERM and callable(second):
                second = debounced(second, time.monotonic())
            signal.signal(caught, second)
        # In another thread: the signal may have interrupted this one in the middle of a write.
        threading.Thread(target=announce, daemon=True).start()

    with signal_handlers(dict.fromkeys(previous, request_stop)):
        yield


def debounced(
    handler: Callable[[int, FrameType | None], object], last: float = -math.inf
) -> Handler:
    """A handler that ignores a signal shortly after the last one.

    A signal to a group of processes reaches a process twice if its parent, such as a launcher,
    passes it on.

    Args:
        last: time of the last signal on the monotonic clock.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before = last
        last = time.monotonic()
        if last - before > DEBOUNCE_SECONDS:
            handler(number, frame)

    return handle


@contextmanager
def signal_handlers(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Install signal handlers inside the block; only in the main thread, as Python requires."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def make_request(output_dir: Path, request: Request) -> None:
    """Send a request to the session that runs in an output folder.

    Raises:
        OSError: the folder is not writable.
    """
    folder = output_dir / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / request).touch()


def expect_requests(output_dir: Path) -> None:
    """Create the folder for requests, and discard requests to an earlier session."""
    (output_dir / FOLDER).mkdir(exist_ok=True)
    take_requests(output_dir)


def take_requests(output_dir: Path) -> list[Request]:
    """The requests since the last call. Removes their files and leaves other files alone."""
    return [request for request in REQUESTS if take_request(output_dir, request)]


def take_request(output_dir: Path, request: Request) -> bool:
    """Whether a request was made since the last call. Removes its file."""
    try:
        # No `exists` first: removing the file claims the request, so it is never taken twice.
        (output_dir / FOLDER / request).unlink()
    except OSError:  # usually, no such request
        return False
    return True
