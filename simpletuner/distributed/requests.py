"""Requests to a running session. They are files; a stop is also requested by a signal or by another process.

touch output/requests/stop                 end after the current step, as Ctrl-C does
touch output/requests/stop_at_epoch_end    end after the last step of the epoch
touch output/requests/save                 a checkpoint now
touch output/requests/preview              previews now
"""

from __future__ import annotations

import signal
import sys
import threading
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
STOPPING = "Stopping after this step. Ctrl-C again stops at once and loses everything since the last checkpoint."


class Stop:
    """Whether this process was asked to stop after the current step.

    A signal handler and the watch of the other processes call `request`. Sources are polled: they look for files.
    """

    def __init__(self, *sources: Callable[[], bool]) -> None:
        self._sources, self.requested = list(sources), False

    def look_at(self, source: Callable[[], bool]) -> None:
        """Look for requests at a source, too."""
        self._sources.append(source)

    def request(self) -> None:
        """Ask for a stop; callable from any thread, and in the middle of any statement."""
        self.requested = True  # never unset

    def is_due(self) -> bool:
        """Whether a stop was requested, here or at a source."""
        if not self.requested and any(source() for source in self._sources):
            self.request()
        return self.requested

    def check(self) -> None:
        """Called where work can be cut short.

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

    handlers: dict[int, Handler] = {signal.SIGTERM: interrupt}
    if sys.platform != "win32":
        handlers[signal.SIGHUP] = signal.SIG_IGN
    with handling(handlers):
        yield


@contextmanager
def stop_on_interrupt(stop: Stop, announce: Callable[[], object]) -> Iterator[None]:
    """Turn the first Ctrl-C (or SIGTERM) into a request to stop after the step; a second one interrupts at once.

    Args:
        announce: called in a thread when a stop is requested.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        stop.request()
        for each, handler in previous.items():
            # Ignored by the parent, as in a script's background job: the second must work as the first did.
            signal.signal(each, signal.default_int_handler if handler is signal.SIG_IGN else handler)
        # In another thread: the signal may have interrupted this one in the middle of a write.
        threading.Thread(target=announce, daemon=True).start()

    with handling(dict.fromkeys(previous, ask)):
        yield


@contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Handle signals inside the block; only in the main thread, as Python allows no handlers in others."""
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
    """Ask the session that runs in an output folder for something.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = output_dir / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / request).touch()


def expect_requests(output_dir: Path) -> None:
    """Create the folder for requests, and discard those to an earlier session."""
    (output_dir / FOLDER).mkdir(exist_ok=True)
    take_requests(output_dir)


def take_requests(output_dir: Path) -> list[Request]:
    """The requests since the last call; their files are removed. Other files stay."""
    return [request for request in REQUESTS if take_request(output_dir, request)]


def take_request(output_dir: Path, request: Request) -> bool:
    """Whether something was requested since the last call; its file is removed."""
    try:
        # Not `exists` first: whoever removes the file has the request, and nobody has it twice.
        (output_dir / FOLDER / request).unlink()
    except OSError:  # usually there is none
        return False
    return True
