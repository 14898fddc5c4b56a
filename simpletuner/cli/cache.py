"""`simpletuner cache`: fill caches, verify them, explain entries, and remove unused ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from simpletuner.cli.settings import PASS_THROUGH, command_settings, uncollected

if TYPE_CHECKING:
    from simpletuner.plan.build import Plan

app = typer.Typer(help="Fill, verify, explain and clean the caches of a configuration.", no_args_is_help=True)


def parse_share(text: str) -> tuple[int, int]:
    """Number and count of a share: `2/3` is the second of three."""
    found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    number, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= number <= count:
        raise typer.BadParameter(f"--shard {text!r} is no share; 1/3 is the first of three, 3/3 the last.")
    return number, count


@app.command(context_settings=PASS_THROUGH)
def fill(
    context: typer.Context,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Encode share I of N, for N machines that use the same disk.")
    ] = "1/1",
) -> None:
    """Encode every caption and picture that is not cached yet, then stop. Settings follow as in train."""
    number, count = parse_share(shard)
    plan = _plan(context.args)
    from simpletuner.caching.catalogue import Share
    from simpletuner.reporting.log import setup_logging
    from simpletuner.reporting.progress import shown_events

    setup_logging()
    with shown_events() as events:
        from simpletuner.run.caches import fill_caches

        fill_caches(plan, events, Share(number - 1, count))


@app.command(context_settings=PASS_THROUGH)
def verify(context: typer.Context) -> None:
    """Read every entry of the configuration's caches and compare it with its checksum.

    After Ctrl-C it goes on where it stopped; verified.json in each cache folder says what was read and when.
    """
    plan = _plan(context.args)
    from simpletuner.cli.cache_inspection import verify_caches

    _echo(verify_caches(plan))


@app.command(context_settings=PASS_THROUGH)
def gc(
    context: typer.Context, remove: Annotated[bool, typer.Option("--remove", help="Delete what is listed.")] = False
) -> None:
    """List entries that this configuration does not refer to; delete them only with --remove.

    Entries of other model families in a shared folder are left alone. Entries of another configuration of the same
    family are listed, too: do not remove them while you need both.
    """
    plan = _plan(context.args)
    from simpletuner.cli.cache_inspection import clean_caches

    _echo(clean_caches(plan, remove=remove))


@app.command("explain", context_settings=PASS_THROUGH)
def explain_file(context: typer.Context, file: str) -> None:
    """Say which entries belong to a picture (a path, or dataset/name), and why they are or are not reused.

    Settings follow the file.
    """
    if file.startswith("--") or "=" in file:
        raise typer.BadParameter(f"{file!r} is a setting; the file comes first, settings after it.")
    plan = _plan(context.args)
    from simpletuner.cli.cache_inspection import explain_caching

    _echo(explain_caching(plan, file))


def _echo(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _plan(tokens: list[str]) -> Plan:
    from simpletuner.plan.build import make_plan

    with uncollected():
        return make_plan(*command_settings(tokens))
