"""Starts the processes of a run.

    simpletuner train ─► accelerate launch ─► simpletuner train (one per device)

torchrun, accelerate and srun may also start the processes directly.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from simpletuner.annexes.processes.group import LAUNCHER, RemoteError
from simpletuner.annexes.processes.watch import GONE
from simpletuner.config.launch import LaunchConfig
from simpletuner.distributed.requests import signal_handlers
from simpletuner.distributed.world import usable_cores
from simpletuner.errors import UserError

EXTRA = "ACCELERATE_EXTRA_ARGS"


def start_processes(launch: LaunchConfig, command: list[str]) -> None:
    """Run a command of `simpletuner` in `num_processes` processes, until all have finished.

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
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        first_was_killed = codes.get(0, 0) < 0
        if first_was_killed:  # so it has not printed an error
            rank = int(arguments.machine_rank or 0) * launch.local_processes
            raise RemoteError(f"Process {rank} on {socket.gethostname()} {GONE}.", 1) from None
        exit_codes = [code for code in codes.values() if code > 0]  # others were killed
        raise typer.Exit(exit_codes[0] if exit_codes else 1) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(why_not_launched(str(error), arguments, launch)) from None


def why_not_launched(error: str, arguments: Any, launch: LaunchConfig) -> str:
    """Translate a rendezvous error of accelerate or torch into terms of the settings."""
    address = f"{arguments.main_process_ip}:{arguments.main_process_port}"
    if "EADDRINUSE" in error or "another process is utilizing it" in error:
        return (
            f"{EXTRA}: {address} is in use by another run or program; choose another "
            "--main_process_port."
        )
    if "timed out" in error.lower() or "timeout" in error.lower():
        return (
            f"{EXTRA}: {launch.num_machines} machines did not connect to {address} within "
            f"{launch.start_timeout} s. Start the same command on all of them, with the first "
            "one's address, an open port and different machine_ranks; start_timeout allows "
            "more time."
        )
    return f"accelerate launch: {error.partition(chr(10))[0]}"


def launch_arguments(launch: LaunchConfig, command: list[str]) -> Any:
    """The arguments of `accelerate launch`, parsed by its parser.

    Raises:
        UserError: ACCELERATE_EXTRA_ARGS has unknown options, or lacks options that several machines
            need.
    """
    from accelerate.commands.launch import launch_command_parser

    extra = os.environ.get(EXTRA, "")
    # accelerate's default is one thread per process.
    threads = os.environ.get("OMP_NUM_THREADS")
    if not threads:
        threads = str(max(1, usable_cores() // launch.local_processes))
    options = {
        "--num_processes": str(launch.num_processes),
        "--num_machines": str(launch.num_machines),
        # This program sets the precision and compiles, not accelerate.
        "--mixed_precision": "no",
        "--dynamo_backend": "no",
        "--monitor_interval": "0.2",
        "--num_cpu_threads_per_process": threads,
        "--rdzv_conf": f"timeout={launch.start_timeout}",
    }
    words = ["--multi_gpu"]
    for option, value in options.items():
        words += [option, value]
    try:
        words += shlex.split(extra)
        # argparse prints its usage.
        with Path(os.devnull).open("w") as discarded, redirect_stderr(discarded):
            arguments = launch_command_parser().parse_args([*words, "-m", "simpletuner", *command])
    except (ValueError, SystemExit):
        raise UserError(
            f"{EXTRA}: {extra!r} has options unknown to `accelerate launch`; see its --help."
        ) from None
    if launch.num_machines > 1:
        _check_machines(launch, arguments)
    elif arguments.main_process_port is None:
        arguments.main_process_port = 0  # any free port: another run may use the default
    arguments.signals_to_handle = "SIGQUIT"  # `signals_passed_on` handles the others
    return arguments


def _check_machines(launch: LaunchConfig, arguments: Any) -> None:
    """Check that this machine has its rank and the address of the first one.

    Raises:
        UserError: ACCELERATE_EXTRA_ARGS lacks one of them.
    """
    missing = []
    if arguments.machine_rank is None:
        missing.append("--machine_rank")
    if arguments.main_process_ip is None:
        missing.append("--main_process_ip")
    if missing:
        example = "--machine_rank 0 --main_process_ip 10.0.0.1 --main_process_port 29500"
        raise UserError(
            f"{EXTRA}: num_machines is {launch.num_machines}, so it must have "
            f"{' and '.join(missing)}, such as {example!r}; only machine_rank differs between the "
            "machines."
        )


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """Forward Ctrl-C and SIGTERM to the processes.

    They run in sessions of their own, so the terminal's signals do not reach them.
    """
    import psutil

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.send_signal(number)

    with signal_handlers({signal.SIGINT: pass_on, signal.SIGTERM: pass_on}):
        yield
