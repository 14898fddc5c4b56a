"""What the commands that take settings share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from simpletuner.errors import UserError

if TYPE_CHECKING:
    from simpletuner.config.sources import Arguments
    from simpletuner.data.discovery import Scan
    from simpletuner.plan.build import Plan
    from simpletuner.reporting.events import EventStream

# Unknown options are settings, which the option schema parses, not click.
PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
Cached = Annotated[bool, typer.Option("--cached", help="Use the downloaded files of remote datasets; fetch none.")]


def set_environment() -> None:
    """Set what native libraries read when they are loaded, unless the user has."""
    # As nvidia-smi counts, which the plan asks; CUDA would call the fastest of different cards the first.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # OpenMP's threads spin while they wait for each other: on a busy CPU, a step took 30 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def command_settings(tokens: list[str], *, cached: bool = False) -> Arguments:
    """The settings on the command line; `cached` is the option of that name."""
    from simpletuner.config.sources import parse_arguments

    arguments = parse_arguments(tokens)
    arguments.collect = partial(_collect_remote, fetches=not cached)
    return arguments


def planned(tokens: list[str], purpose: Literal["train", "survey"] = "train", *, cached: bool = False) -> Plan:
    """The plan of the settings on the command line.

    Raises:
        ConfigError: with every problem at once.
    """
    from simpletuner.plan.build import make_plan

    with uncollected():
        return make_plan(command_settings(tokens, cached=cached), purpose)


def _collect_remote(*entries_and_more: Any, fetches: bool) -> Mapping[str, Scan]:
    """The door to remote datasets; what is behind it is loaded when a dataset is remote."""
    from simpletuner.annexes.remote.collect import collect

    return collect(*entries_and_more, fetches=fetches)


@contextmanager
def logged_events(debug_file: Path | None = Path("debug.log")) -> Iterator[EventStream]:
    """A display of what happens, and a log of it."""
    from simpletuner.annexes.display.log import setup_logging
    from simpletuner.annexes.display.progress import shown_events

    setup_logging(debug_file)
    with shown_events() as events:
        yield events


@contextmanager
def uncollected() -> Iterator[None]:
    """Import or plan without garbage collection, and exempt the result from it.

    Importing torch and listing many files create long-lived objects, which later collections would scan for nothing.
    Does nothing if torch is imported already: the process is then not ours, and neither are its objects.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def prepare_output(folder: Path) -> None:
    """Create the output folder; on some file systems only this shows that it is not writable.

    Raises:
        UserError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir: {str(folder)!r} cannot be created: {error.strerror}.") from None
