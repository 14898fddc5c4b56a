"""Shared by all commands that take settings: parsing, planning, and events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from simpletuner.annexes.display.log import setup_logging
from simpletuner.annexes.display.progress import shown_events
from simpletuner.cli.process import without_gc
from simpletuner.config.device import read_asked_device
from simpletuner.config.sources import Arguments, parse_arguments, secret_settings
from simpletuner.data.discovery import Scan
from simpletuner.errors import UserError
from simpletuner.planning.build import plan_training, survey_datasets
from simpletuner.planning.plans import Plan, Survey
from simpletuner.reporting.events import EventStream

# `--device` and `--device-memory`: questions for a plan, which no config stores.
CardAsked = Annotated[
    str | None, typer.Option("--device", metavar="CARD", help="Card to plan for: h100.")
]
MemoryAsked = Annotated[
    str | None,
    typer.Option(
        "--device-memory", "--device_memory", metavar="GB", help="GPU memory to plan for."
    ),
]
Cached = Annotated[
    bool,
    typer.Option("--cached", help="Use the files of remote datasets that are already downloaded."),
]


def command_settings(tokens: list[str], *, cached: bool = False) -> Arguments:
    """The settings on the command line.

    Args:
        cached: use only downloaded files of remote datasets.
    """
    arguments = parse_arguments(tokens)
    arguments.settings += secret_settings()
    arguments.collect = partial(_collect_remote, fetches=not cached)
    return arguments


def set_asked_device(arguments: Arguments, device: str | None, memory: str | float | None) -> None:
    """Plan for this device; a wrong name or number becomes one of the arguments' problems."""
    arguments.device = read_asked_device(arguments.problems, device, memory)


def refuse_asked_device(device: str | None, memory: str | None) -> None:
    """Refuse `--device` and `--device-memory` in a command that trains.

    Raises:
        UserError: one of them is given.
    """
    for flag, value in (("--device", device), ("--device-memory", memory)):
        if value is not None:
            advice = (
                "training uses the device of this machine. To plan for another one, add --dry-run."
            )
            raise UserError(f"{flag} {value}: {advice}")


def plan_caches(tokens: list[str], *, cached: bool = False) -> Plan:
    """The plan of the caches of a run, for the settings on the command line.

    Raises:
        ConfigError: lists all problems.
    """
    with without_gc():
        return plan_training(command_settings(tokens, cached=cached), "caches")


def plan_survey(tokens: list[str], *, cached: bool = False) -> Survey:
    """The datasets of the settings on the command line.

    Raises:
        ConfigError: lists all problems.
    """
    with without_gc():
        return survey_datasets(command_settings(tokens, cached=cached))


def _collect_remote(*args: Any, fetches: bool) -> Mapping[str, Scan]:
    """List the files of remote datasets."""
    # The client of hubs and pages takes 0.1 s to import, and most datasets are local.
    from simpletuner.annexes.remote.collect import collect

    return collect(*args, fetches=fetches)


@contextmanager
def logged_events(debug_file: Path | None = Path("debug.log")) -> Iterator[EventStream]:
    """An event stream that is displayed in the terminal, with logging set up."""
    setup_logging(debug_file)
    with shown_events() as events:
        yield events


def prepare_output(folder: Path) -> None:
    """Create the output folder: on some file systems the only sure check that it is writable.

    Raises:
        UserError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"output_dir: {str(folder)!r} cannot be created: {error.strerror}."
        raise UserError(message) from None
