"""Training with several processes, which start, fail and stop together.

    simpletuner train ─► accelerate launch ─► simpletuner train (one per device)

torchrun, accelerate and srun may also start the processes directly.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import typer

from simpletuner.annexes.processes.joining import (
    START_SECONDS,
    ConnectedWorld,
    NotJoinedError,
    connect,
    settle_meeting,
)
from simpletuner.annexes.processes.watch import GONE, GRACE_SECONDS, Watch
from simpletuner.config.launch import LaunchConfig
from simpletuner.distributed.requests import handling, signals_as_interrupt
from simpletuner.distributed.world import World, usable_cores
from simpletuner.errors import ConfigError, Interrupted, SimpleTunerError, UserError, full_text
from simpletuner.redaction import redact

logger = logging.getLogger(__name__)

EXTRA = "ACCELERATE_EXTRA_ARGS"
# Seconds that a failed process lingers, so that process 0 can print the error before a launcher ends all processes.
LINGER = 3.0
LAUNCHER = "SIMPLETUNER_LAUNCHER"  # set for processes that this program starts, and whose deaths it reports


def start_processes(launch: LaunchConfig, command: list[str]) -> None:
    """Run a command of `simpletuner` in `num_processes` processes; returns when all of them have finished.

    Raises:
        typer.Exit: one of them failed; process 0 has printed why.
        UserError: ACCELERATE_EXTRA_ARGS is invalid, or accelerate cannot launch.
    """
    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    arguments = launch_arguments(launch, command)
    # torch would print the errors of the processes again.
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    os.environ[LAUNCHER] = "1"
    try:
        with signals_passed_on():
            launch_command(arguments)
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]
        if 0 in failed.failures and failed.failures[0].exitcode < 0:  # killed, so it has not printed an error
            rank = int(arguments.machine_rank or 0) * launch.local_processes
            raise RemoteError(f"Process {rank} on {socket.gethostname()} {GONE}.", 1) from None
        raise typer.Exit(next((code for code in codes if code > 0), 1)) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(why_not_launched(str(error), arguments, launch)) from None


def why_not_launched(error: str, arguments: Any, launch: LaunchConfig) -> str:
    """Translate a rendezvous error of accelerate or torch into terms of the settings."""
    where = f"{arguments.main_process_ip}:{arguments.main_process_port}"
    if "EADDRINUSE" in error or "another process is utilizing it" in error:
        return f"{EXTRA}: {where} is in use by another run or program; choose another --main_process_port."
    if "timed out" in error.lower() or "timeout" in error.lower():
        return (
            f"{EXTRA}: {launch.num_machines} machines did not connect to {where} within {launch.start_timeout} s. "
            "Start the same command on all of them, with the first one's address, an open port and different "
            "machine_ranks; start_timeout allows more time."
        )
    return f"accelerate launch: {error.partition(chr(10))[0]}"


def launch_arguments(launch: LaunchConfig, command: list[str]) -> Any:
    """The arguments of `accelerate launch`, parsed by its parser.

    Raises:
        UserError: ACCELERATE_EXTRA_ARGS has unknown options, or lacks options that several machines need.
    """
    from accelerate.commands.launch import launch_command_parser

    extra = os.environ.get(EXTRA, "")
    # accelerate's default is one thread per process.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // launch.local_processes))
    words = [
        *("--multi_gpu", "--num_processes", str(launch.num_processes), "--num_machines", str(launch.num_machines)),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--monitor_interval", "0.2"),
        *("--num_cpu_threads_per_process", threads, "--rdzv_conf", f"timeout={launch.start_timeout}"),
    ]
    try:
        words += shlex.split(extra)
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):  # argparse prints its usage
            arguments = launch_command_parser().parse_args([*words, "-m", "simpletuner", *command])
    except (ValueError, SystemExit):
        raise UserError(f"{EXTRA}: {extra!r} has options unknown to `accelerate launch`; see its --help.") from None
    if launch.num_machines > 1:
        needed = {"--machine_rank": arguments.machine_rank, "--main_process_ip": arguments.main_process_ip}
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            example = "--machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500"
            needs = f"num_machines is {launch.num_machines}, so it must have {' and '.join(missing)}"
            raise UserError(f"{EXTRA}: {needs}, such as {example!r}; only machine_rank differs between the machines.")
    elif arguments.main_process_port is None:
        arguments.main_process_port = 0  # any free port: another run may use the default
    arguments.signals_to_handle = "SIGQUIT"  # `signals_passed_on` handles the others
    return arguments


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """Forward Ctrl-C and SIGTERM to the processes, which run in separate sessions and get no terminal signals."""
    import psutil

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.send_signal(number)

    with handling(dict.fromkeys((signal.SIGINT, signal.SIGTERM), pass_on)):
        yield


@contextmanager
def joined(place: World, start_limit: float = START_SECONDS) -> Iterator[World]:
    """Join the other processes within a context. An error in one process ends all, and process 0 prints it.

    Args:
        place: rank and size set by a launcher.
        start_limit: seconds within which all processes must join.
    """
    missing = settle_meeting(place, os.environ)
    if missing:
        raise ConfigError(missing)
    # Saved, because `leave_terminal` replaces it.
    terminal = sys.stderr
    if not place.is_leader:
        leave_terminal()

    def prepare(watch: Watch) -> None:
        if place.is_main:
            watch.ended = complain
        else:
            leave_terminal()
        # One process per machine reports the loss of process 0; on its machine `start_processes` or process 1 does.
        if place.is_leader or (place.rank == 1 and LAUNCHER not in os.environ):
            watch.bereft = partial(print, file=terminal, flush=True)

    with ExitStack() as connected:
        try:
            world = connected.enter_context(connect(place, start_limit=start_limit, prepare=prepare))
        except NotJoinedError as error:
            # Process 0 does not know of it. The first process of a machine has not left the terminal.
            if not place.is_leader:
                complain(str(error), error.exit_code, terminal)
            raise
        try:
            with signals_as_interrupt():
                refuse_shared_gpus(world, own_gpu())
                yield world
        except BaseException as error:  # every error also ends the other processes
            raise together(world, error) from error


def own_gpu() -> str:
    """The UUID of this process's GPU; empty on a CPU."""
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else ""


def refuse_shared_gpus(world: World, gpu: str) -> None:
    """Check that no two processes share a GPU: each plans for a whole one, and NCCL does not support sharing.

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


def together(world: ConnectedWorld, error: BaseException) -> BaseException:
    """Announce a failure; returns the first failure, as this process should raise it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher sends it once the first process has exited
    code = exit_code(error)
    if not world.is_main:
        return typer.Exit(world.watch.fail(_words_of(world, error, code), code, LINGER)[1])
    known, text = world.first_failure(error), full_text(error)
    first, first_code = world.watch.fail(known or text, code, LINGER)
    return error if known is None and first == text else RemoteError(first, first_code)


def _words_of(world: ConnectedWorld, error: BaseException, code: int) -> str:
    """The message that a process other than 0 sends to process 0, which prints it."""
    if code == Interrupted.exit_code or (code == 1 and isinstance(error, SimpleTunerError)):
        # All processes end at once. Process 0 has more to finish, such as trackers, and its end ends this one.
        world.watch.known(GRACE_SECONDS if isinstance(error, Interrupted) else LINGER)
    known, text = world.first_failure(error), full_text(error)
    if known is None and not isinstance(error, SimpleTunerError):
        logger.error("Process %d failed.", world.rank, exc_info=error)
        text = f"{type(error).__name__}: {text} (the traceback is in debug.log)"
    return known or f"Process {world.watch.own}: {text}"


def exit_code(error: BaseException) -> int:
    """The exit code for an error."""
    if isinstance(error, SimpleTunerError | typer.Exit):
        return error.exit_code
    return Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1


class RemoteError(SimpleTunerError):
    """Another process ended the run."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def complain(message: str, code: int, terminal: TextIO | None = None) -> None:
    """Print the error that ends all processes, or this one.

    Args:
        terminal: None prints to the usual place.
    """
    text = redact(f"error: {message}" if code == UserError.exit_code else message)
    print(text, file=terminal or sys.stderr, flush=True)
