"""`simpletuner plan`, `configure` and `publish`: before and after a run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner.cli.settings import Cached, CardAsked, MemoryAsked, ask_about, command_settings, uncollected
from simpletuner.errors import ConfigError, UserError

if TYPE_CHECKING:
    from simpletuner.config.sources import Arguments


def plan(
    context: typer.Context,
    device: CardAsked = None,
    device_memory: MemoryAsked = None,
    devices: Annotated[str | None, typer.Option(metavar="N", help="Plan for this many devices together.")] = None,
    machines: Annotated[str | None, typer.Option(metavar="N", help="Plan for devices in this many machines.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON document, for programs.")] = False,
    cached: Cached = False,
) -> None:
    """Check everything that needs no weights, and print the steps, time, memory and disk space of a run."""
    arguments = command_settings(context.args, cached=cached)
    ask_about(arguments, device, device_memory)
    planned = {"num_processes": devices, "num_machines": machines}
    arguments.settings.extend((key, value) for key, value in planned.items() if value is not None)
    if as_json or not arguments.device.is_elsewhere:
        print_plan(arguments, as_json=as_json)
        return
    # Whether a model fits a card can be asked before there are files.
    from simpletuner.annexes.fitting.nominal import nominal_files

    with nominal_files(arguments) as (nominal, sentence):
        if sentence:
            print(f"{sentence}\n")
        print_plan(nominal)


def print_plan(arguments: Arguments, *, as_json: bool = False) -> None:
    """Print the plan of a run.

    Raises:
        ConfigError: lists all problems.
    """
    from simpletuner.annexes.fitting.ready import weigh_plan
    from simpletuner.annexes.fitting.show import plan_json, show_plan
    from simpletuner.run.companions import read_ledger

    try:
        with uncollected():
            budget = weigh_plan(arguments)
    except ConfigError as error:
        if as_json:
            # Programs read stdout; the raised error is printed on stderr.
            print(plan_json(None, error.problems))
        raise
    plan = budget.plan
    if as_json:
        print(plan_json(budget, [*plan.warnings, *arguments.problems]))
    else:
        show_plan(budget, sys.stdout)
        if plan.is_finished and (ledger := read_ledger(plan.output_dir)):
            print(f"\nAn earlier session has not finished: {ledger}. `simpletuner train` does this first.")
    arguments.problems.raise_if_fatal()  # after the numbers that show why a run does not fit


def configure(
    file: Annotated[Path, typer.Argument(help="The file to write or edit.")] = Path("config/config.json"),
    defaults: Annotated[bool, typer.Option("--defaults", help="Ask nothing: take every default.")] = False,
) -> None:
    """Write config.json by answering questions; ? explains a question. An existing dataset file is not changed."""
    name = str(file).removeprefix("env=")
    named = Path("config", name, "config.json")  # as the other commands find it
    if name != str(file) or (named.is_file() and not file.exists()):
        raise UserError(f"{str(file)!r} is not a file: write simpletuner configure {shlex.quote(str(named))}")
    from simpletuner.annexes.configure.session import run_session
    from simpletuner.annexes.questions.dialogue import Dialogue

    run_session(file, Dialogue(asks=not defaults, unasked="--defaults"))


def publish(context: typer.Context, output_dir: Annotated[Path, typer.Argument(help="A run's folder.")]) -> None:
    """Upload the result of a run for the first time or again, or finish a failed upload. Nothing is trained.

    Settings of the section Publishing override those of the run: publish OUTPUT_DIR --hub_model_id=me/my-lora.
    """
    from simpletuner.annexes.publishing.again import publish_again

    publish_again(output_dir, command_settings(context.args))
