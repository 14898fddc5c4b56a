"""`simpletuner cache`: fill caches, verify them, explain entries, and remove unused ones."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer

from simpletuner.annexes.display.progress import shown_events
from simpletuner.annexes.inspection import (
    Verification,
    entries_of,
    explain,
    find_garbage,
    forget_verifications,
    remove_garbage,
    why_left_out,
)
from simpletuner.caching.catalogue import Share
from simpletuner.cli.settings import logged_events, plan_caches
from simpletuner.cli.settings_command import PASS_THROUGH
from simpletuner.errors import UserError, counted
from simpletuner.planning.entries import Listing, cache_folders, list_entries, make_catalogue
from simpletuner.planning.plans import Plan

Shard = Annotated[
    str, typer.Option(metavar="I/N", help="Encode shard I, on N machines that share a disk.")
]
cache = typer.Typer(
    help="Fill, verify, explain and clean up the caches of a configuration.", no_args_is_help=True
)
app = typer.Typer()
app.add_typer(cache, name="cache")


@cache.command(context_settings=PASS_THROUGH)
def fill(context: typer.Context, shard: Shard = "1/1") -> None:
    """Encode every caption and picture that is not cached yet, then stop.

    Takes the settings of train.
    """
    share = parse_shard(shard)
    plan = plan_caches(context.args)
    with logged_events() as events:
        # At the wall: torch takes seconds to import, so only after the plan's errors are reported.
        from simpletuner.encoding.caches import fill_caches

        fill_caches(plan, events, share)


def parse_shard(text: str) -> Share:
    """The share of the entries that `I/N` means, with I counted from 1.

    Raises:
        UserError: it has another form, or I is above N.
    """
    match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
    if match is not None:
        number = int(match[1])
        count = int(match[2])
        if 1 <= number <= count:
            return Share(number - 1, count)
    raise UserError(f"--shard {text!r} is not a shard; 1/3 is the first of three, 3/3 the last.")


@cache.command(context_settings=PASS_THROUGH)
def verify(context: typer.Context) -> None:
    """Read every entry of the configuration's caches and compare it with its checksum.

    A verification stopped by Ctrl-C resumes where it stopped.

    Its progress is recorded in verifying.json in each cache folder.
    """
    plan = plan_caches(context.args)
    folders = cache_folders(plan)
    damaged = 0
    for folder in folders:
        verification = Verification.of(folder)
        keys = verification.remaining(folder)
        # Progress goes to stderr; stdout lists only the damaged entries, so that it can be piped.
        with shown_events(sys.stderr) as events:
            if verification.last:
                events.notify(f"Continuing an earlier verification of {folder}.")
            with events.phase(f"Verifying {folder}", len(keys), "entries") as phase:
                verification.read(folder, keys, phase.advance)
        for key, reason in verification.damaged.items():
            typer.echo(f"{folder}/{key}: {reason}")
        damaged += len(verification.damaged)
    forget_verifications(folders)
    if damaged:
        entries = counted(damaged, "damaged entry", "damaged entries")
        pronoun = "it" if damaged == 1 else "them"
        raise UserError(f"{entries}; the next run encodes {pronoun} again.")
    if folders:
        typer.echo(f"Every entry in {', '.join(map(str, folders))} is intact.")
    else:
        typer.echo("There are no caches yet.")


@cache.command(context_settings=PASS_THROUGH)
def gc(
    context: typer.Context,
    remove: Annotated[bool, typer.Option("--remove", help="Delete them.")] = False,
) -> None:
    """List entries that this configuration does not refer to; delete them only with --remove.

    Entries of other model families in a shared folder are kept.

    Those of other configurations of the family are listed too: keep them while you need these.
    """
    plan, listing = _listing(context.args)
    # The keys of all configured entries, cached or not.
    wanted = listing.keys()
    total = 0
    for folder in cache_folders(plan):
        garbage = find_garbage(folder, wanted, plan.spec.name)
        for key, source in garbage.entries.items():
            typer.echo(f"{folder}/{key}: {source}")
        total += len(garbage.entries) + len(garbage.leftovers)
        if remove:
            remove_garbage(folder, garbage)
    if not total:
        typer.echo("Nothing to remove: this configuration refers to every entry.")
    else:
        entries = counted(total, "entry or leftover", "entries and leftovers")
        typer.echo(f"{entries} {'removed' if remove else 'found; --remove deletes them'}.")


@cache.command("explain", context_settings=PASS_THROUGH)
def explain_file(context: typer.Context, file: str) -> None:
    """List the entries of a picture (a path, or dataset/name), and why they are or are not reused.

    Settings follow the file.
    """
    if file.startswith("--") or "=" in file:
        raise UserError(f"{file!r} is a setting; the file comes first, settings after it.")
    plan, listing = _listing(context.args)
    entries = entries_of(file, listing.latents, listing.texts, listing.catalogue)
    if not entries:
        reason = why_left_out(file, plan.datasets)
        if reason:
            raise UserError(f"{file!r} is not used: it {reason}.")
        raise UserError(
            f"{file!r} is not used by this configuration; `simpletuner plan` lists every file."
        )
    for entry in entries:
        for line in explain(entry):
            typer.echo(line)


def _listing(tokens: list[str]) -> tuple[Plan, Listing]:
    """The plan of the caches, and all entries that it needs.

    Raises:
        UserError: the checkpoint is not downloaded yet.
    """
    plan = plan_caches(tokens)
    catalogue = make_catalogue(plan)
    # Keys contain the checkpoint's digests, which are unknown until it is downloaded.
    if catalogue is None:
        raise UserError("The checkpoint is not on this machine yet, so it has no cache entries.")
    return plan, list_entries(plan, catalogue)
