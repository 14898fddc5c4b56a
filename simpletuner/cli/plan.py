"""`simpletuner plan`: the cost of a run and all its problems, before it starts."""

from __future__ import annotations

import sys
from collections.abc import Set
from pathlib import Path
from typing import Annotated

import typer

from simpletuner.annexes.fitting.card_table import card_table
from simpletuner.annexes.fitting.nominal import nominal_files
from simpletuner.annexes.fitting.plan_json import plan_json
from simpletuner.annexes.fitting.plan_text import detail_lines
from simpletuner.annexes.fitting.ready import weigh_plan
from simpletuner.annexes.fitting.show import show_summary, show_warnings
from simpletuner.annexes.fitting.show_cards import table_json, table_lines
from simpletuner.budget.budget import Budget
from simpletuner.cli.problems import print_problems
from simpletuner.cli.process import without_gc
from simpletuner.cli.settings import (
    Cached,
    CardAsked,
    MemoryAsked,
    command_settings,
    set_asked_device,
)
from simpletuner.cli.settings_command import PASS_THROUGH, SettingsCommand
from simpletuner.config.sources import Arguments, lacks_configuration
from simpletuner.errors import ConfigError, Problems
from simpletuner.planning.plans import Plan
from simpletuner.reporting.screen import layout_of
from simpletuner.run.companions import read_ledger

Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", help="List every file, the family's settings, and the cost of each size."
    ),
]
app = typer.Typer()


@app.command(cls=SettingsCommand, context_settings=PASS_THROUGH)
def plan(
    context: typer.Context,
    device: CardAsked = None,
    device_memory: MemoryAsked = None,
    devices: Annotated[
        str | None, typer.Option(metavar="N", help="Plan for this many devices together.")
    ] = None,
    machines: Annotated[
        str | None, typer.Option(metavar="N", help="Plan for devices in this many machines.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan as one JSON document, for programs.")
    ] = False,
    verbose: Verbose = False,
    cached: Cached = False,
) -> None:
    """Check everything that needs no weights, and print the steps, time, memory and disk space of a
    run. Without a configuration, show what the card can train.
    """
    arguments = command_settings(context.args, cached=cached)
    set_asked_device(arguments, device, device_memory)
    if devices is not None:
        arguments.settings.append(("num_processes", devices))
    if machines is not None:
        arguments.settings.append(("num_machines", machines))
    if lacks_configuration(arguments):
        print_card_table(arguments, as_json=as_json)
        return
    if as_json or not arguments.device.is_elsewhere:
        print_plan(arguments, as_json=as_json, verbose=verbose)
        return
    # Whether a model fits a card can be asked before there are files.
    with nominal_files(arguments) as (nominal, sentence):
        if sentence:
            for line in layout_of(sys.stdout).wrap(sentence):
                print(line)
            print()
        hidden = {"data_backend_config"} if sentence else set[str]()
        print_plan(nominal, verbose=verbose, hidden=hidden)


def print_card_table(arguments: Arguments, *, as_json: bool) -> None:
    """Print what a card can train, where there is no configuration to plan.

    Raises:
        ConfigError: the card is not known, or a word is not a setting.
    """
    arguments.problems.raise_if_fatal()
    with without_gc():
        table = card_table(arguments.device)
    if as_json:
        print(table_json(table))
        return
    layout = layout_of(sys.stdout)
    for line in table_lines(table, arguments.device, layout):
        print(line)
    configs = sorted(path.parent.name for path in Path("config").glob("*/config.json"))
    if configs:
        print(f"A run of this folder: `simpletuner plan env={'` or `env='.join(configs)}`")


def print_plan(
    arguments: Arguments,
    *,
    as_json: bool = False,
    verbose: bool = False,
    hidden: Set[str] = frozenset(),
) -> None:
    """Print the plan of a run: a summary, all problems, then the details.

    Args:
        arguments: the settings.
        as_json: print one JSON document instead.
        verbose: print every detail.
        hidden: keys of temporary files, which are not shown.

    Raises:
        ConfigError: lists all problems.
    """
    try:
        with without_gc():
            budget = weigh_plan(arguments)
    except ConfigError as error:
        if as_json:
            # Programs read stdout; the raised error is printed on stderr.
            print(plan_json(None, error.problems))
        raise
    problems = arguments.problems
    if as_json:
        print(plan_json(budget, [*budget.plan.warnings, *problems]))
        if problems.are_fatal:
            print_problems(problems, sys.stderr)
    else:
        show_summary(budget, sys.stdout)
        _print_problems_of(budget.plan, problems)
        _print_details(budget, verbose=verbose, hidden=hidden)
    if problems.are_fatal:  # the numbers above show why a run does not fit
        raise ConfigError(problems, is_printed=True)


def _print_problems_of(plan: Plan, problems: Problems) -> None:
    """Print what prevents a run; if nothing does, its warnings."""
    if not problems.are_fatal:
        show_warnings(plan.warnings, sys.stdout)
        return
    print(flush=True)  # the order of both streams on a terminal
    print_problems(problems, sys.stderr)
    sys.stderr.flush()


def _print_details(budget: Budget[Plan], *, verbose: bool, hidden: Set[str]) -> None:
    """Print the plan in the width of the terminal, and what an earlier session left to do."""
    print()
    for line in detail_lines(budget, layout_of(sys.stdout), verbose=verbose, hidden=hidden):
        print(line)
    plan = budget.plan
    ledger = read_ledger(plan.output_dir) if plan.is_finished else None
    if ledger:
        print(
            f"\nAn earlier session has not finished: {ledger}. `simpletuner train` does this first."
        )
