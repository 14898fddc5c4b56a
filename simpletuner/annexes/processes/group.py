"""Processes that fail together: the first error ends all of them, and process 0 prints it."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import typer

from simpletuner.annexes.processes.joining import (
    START_SECONDS,
    ConnectedWorld,
    NotJoinedError,
    connect,
    set_rendezvous,
)
from simpletuner.annexes.processes.watch import GRACE_SECONDS, EndReporter
from simpletuner.distributed.requests import signals_as_interrupt
from simpletuner.distributed.world import World
from simpletuner.errors import Interrupted, Problems, SimpleTunerError, UserError, full_text
from simpletuner.redaction import redact

logger = logging.getLogger(__name__)

# A failed process lingers so long, for process 0 to print the error before a launcher ends all
# processes.
LINGER_SECONDS = 3.0
# Set for processes that this program starts, and whose deaths it reports.
LAUNCHER = "SIMPLETUNER_LAUNCHER"


class RemoteError(SimpleTunerError):
    """Another process ended the run."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class TerminalReporter(EndReporter):
    """Prints why the run ends: in process 0, and if that is lost, in one process per machine."""

    def __init__(self, place: World) -> None:
        self._place = place
        # Kept, because `leave_terminal` replaces it.
        self._terminal = sys.stderr

    def on_joined(self) -> None:
        if not self._place.is_main:
            leave_terminal()

    def on_ended(self, message: str, code: int) -> None:
        if self._place.is_main:
            print_error(message, code)

    def on_leader_lost(self, message: str) -> None:
        # On the machine of process 0, `start_processes` reports its loss, or process 1 if another
        # launcher was used.
        if self._place.is_leader or (self._place.rank == 1 and LAUNCHER not in os.environ):
            print(message, file=self._terminal, flush=True)

    def on_not_joined(self, error: NotJoinedError) -> None:
        """Print why this process cannot reach process 0."""
        # The first process of a machine still has its terminal, where the error is printed.
        if not self._place.is_leader:
            print_error(str(error), error.exit_code, self._terminal)


@contextmanager
def process_group(place: World, start_limit: float = START_SECONDS) -> Iterator[World]:
    """Join the other processes within a context.

    An error in one process ends all of them, and process 0 prints it.

    Args:
        place: rank and size set by a launcher.
        start_limit: seconds within which all processes must join.
    """
    report = Problems()
    set_rendezvous(place, os.environ, report)
    report.raise_if_fatal()
    reporter = TerminalReporter(place)
    if not place.is_leader:
        leave_terminal()
    with ExitStack() as connected:
        try:
            world = connected.enter_context(
                connect(place, start_limit=start_limit, reporter=reporter)
            )
        except NotJoinedError as error:
            reporter.on_not_joined(error)
            raise
        try:
            with signals_as_interrupt():
                refuse_shared_gpus(world, own_gpu())
                yield world
        except BaseException as error:  # every error also ends the other processes
            raise agree_on_error(world, error) from error


def own_gpu() -> str:
    """The UUID of this process's GPU; empty on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def refuse_shared_gpus(world: World, gpu: str) -> None:
    """Check that no two processes share a GPU.

    Each plans for a whole one, and NCCL does not support sharing.

    Raises:
        UserError: processes share a GPU; raised in every process.
    """
    gpus = world.gather(gpu)
    shared = [str(rank) for rank, uuid in enumerate(gpus) if uuid and gpus.count(uuid) > 1]
    if shared:
        advice = "Start fewer, or let the launcher assign different GPUs (CUDA_VISIBLE_DEVICES)."
        raise UserError(f"Processes {', '.join(shared)} share GPUs; each needs its own. {advice}")


def leave_terminal() -> None:
    """Discard output: once all processes have joined, only process 0 prints."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the very end


def agree_on_error(world: ConnectedWorld, error: BaseException) -> BaseException:
    """Announce a failure; returns what this process must raise for the first failure of all."""
    # A launcher sends SIGTERM once the first process has exited.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = exit_code(error)
    if not world.is_main:
        message = _message_for_main(world, error, code)
        _, first_code = world.watch.fail(message, code, LINGER_SECONDS)
        return typer.Exit(first_code)
    cause = world.first_failure(error)
    text = full_text(error)
    first, first_code = world.watch.fail(cause or text, code, LINGER_SECONDS)
    is_own_failure = cause is None and first == text
    return error if is_own_failure else RemoteError(first, first_code)


def _message_for_main(world: ConnectedWorld, error: BaseException, code: int) -> str:
    """The message that a process other than 0 sends to process 0, which prints it."""
    if code == Interrupted.exit_code or (code == 1 and isinstance(error, SimpleTunerError)):
        # All processes end at once. Process 0 has more to finish, such as trackers, and its end
        # ends this one.
        is_interrupted = isinstance(error, Interrupted)
        world.watch.wait_for_verdict(GRACE_SECONDS if is_interrupted else LINGER_SECONDS)
    cause = world.first_failure(error)
    if cause is not None:
        return cause
    text = full_text(error)
    if not isinstance(error, SimpleTunerError):
        logger.error("Process %d failed.", world.rank, exc_info=error)
        text = f"{type(error).__name__}: {text} (the traceback is in debug.log)"
    return f"Process {world.watch.own}: {text}"


def exit_code(error: BaseException) -> int:
    """The exit code for an error."""
    if isinstance(error, SimpleTunerError | typer.Exit):
        return error.exit_code
    return Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1


def print_error(message: str, code: int, terminal: TextIO | None = None) -> None:
    """Print the error that ends all processes, or this one.

    Args:
        terminal: None prints to the usual place.
    """
    text = redact(f"error: {message}" if code == UserError.exit_code else message)
    print(text, file=terminal or sys.stderr, flush=True)
