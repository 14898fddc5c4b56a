"""What may be asked of a run under way: by a signal, or by a file in `output_dir/requests/`. Free of torch.

touch output/requests/stop       end after the step under way, as Ctrl-C does
touch output/requests/save       a checkpoint now
touch output/requests/preview    previews now
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal, cast, get_args

from simpletuner.reporting.events import EventStream, StateChanged

FOLDER = "requests"
Request = Literal["stop", "save", "preview"]
Handler = Callable[[int, FrameType | None], None] | signal.Handlers
STOPPING = "Stopping after this step. Ctrl-C again stops at once, and what was done since the last checkpoint is lost."


def take_requests(output_dir: Path) -> list[Request]:
    """The requests that were left since the last call; their files are removed. Other files stay."""
    found = []
    for name in get_args(Request):
        try:
            (output_dir / FOLDER / name).unlink()
        except OSError:  # not there, which is the rule
            continue
        found.append(cast(Request, name))
    return found


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """SIGTERM is answered as Ctrl-C is, and a terminal that closes does not end the process."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handlers: dict[int, Handler] = {signal.SIGTERM: interrupt}
    if sys.platform != "win32":
        handlers[signal.SIGHUP] = signal.SIG_IGN
    with _handling(handlers):
        yield


@contextmanager
def stop_on_interrupt(events: EventStream, stopping: Callable[[], StateChanged]) -> Iterator[None]:
    """Turn the first Ctrl-C (or SIGTERM) into a request to stop after the step; the second one interrupts at once.

    Args:
        stopping: the event that says so.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        events.stop.requested = True
        for each, handler in previous.items():
            signal.signal(each, handler)
        # In a thread, because the signal may have come in the middle of a write of this one.
        threading.Thread(target=events.publish, args=(stopping(),), daemon=True).start()

    with _handling(dict.fromkeys(previous, ask)):
        yield


@contextmanager
def _handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
