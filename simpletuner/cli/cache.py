"""`simpletuner cache`: complete caches, check them, explain entries, and clear out what nobody needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simpletuner.caching.catalogue import Catalogue, LatentEntry, TextEntry
from simpletuner.caching.entry import find_entry
from simpletuner.caching.inspect import Garbage, explain, explain_miss, find_damaged, find_garbage, remove_garbage
from simpletuner.cli.train import PASS_THROUGH, parse_settings
from simpletuner.errors import UserError
from simpletuner.plan.build import Plan, make_plan
from simpletuner.plan.entries import make_catalogue, text_folder, wanted_entries

app = typer.Typer(help="Fill, verify, explain and clean the caches of a configuration.", no_args_is_help=True)


@app.command(context_settings=PASS_THROUGH)
def fill(context: typer.Context) -> None:
    """Encode every caption and picture that is not cached yet, then stop. Settings follow as in train."""
    from simpletuner.reporting.log import setup_logging
    from simpletuner.reporting.progress import make_progress

    plan = make_plan(*parse_settings(context.args))
    setup_logging()
    with make_progress() as progress:
        from simpletuner.run.caches import fill_caches

        fill_caches(plan, progress)


@app.command(context_settings=PASS_THROUGH)
def verify(context: typer.Context) -> None:
    """Read every entry of the configuration's caches and compare it with its checksum."""
    plan = make_plan(*parse_settings(context.args))
    damaged = 0
    for folder in cache_folders(plan):
        for damage in find_damaged(folder):
            damaged += 1
            typer.echo(f"{folder}/{damage.key}: {damage.reason}")
    if damaged:
        raise UserError(f"{damaged} damaged entries; the next run makes them anew.")
    typer.echo(f"Every entry in {', '.join(str(folder) for folder in cache_folders(plan))} is whole.")


@app.command(context_settings=PASS_THROUGH)
def gc(
    context: typer.Context,
    remove: Annotated[bool, typer.Option("--remove", help="Delete what is listed.")] = False,
) -> None:
    """List entries that this configuration does not refer to; delete them only with --remove.

    Entries of other model families in a shared folder are left alone. Entries of another configuration of the same
    family are listed, too: do not remove them while you need both.
    """
    plan = make_plan(*parse_settings(context.args))
    texts, latents = wanted_entries(plan, _catalogue(plan), epoch=1)
    wanted = {entry.key.digest() for entry in texts} | {entry.key.digest() for entry in latents}
    total = 0
    for folder in cache_folders(plan):
        garbage = _of_family(folder, find_garbage(folder, wanted), plan.spec.name)
        for key in garbage.entries:
            typer.echo(f"{folder}/{key}: {explain(folder, key).get('source', 'unknown')}")
        total += len(garbage.entries) + len(garbage.leftovers)
        if remove:
            remove_garbage(folder, garbage)
    typer.echo(f"{total} entries and leftovers {'removed' if remove else 'found; --remove deletes them'}.")


@app.command("explain", context_settings=PASS_THROUGH)
def explain_file(context: typer.Context, file: str) -> None:
    """Say which entries belong to a picture (a path, or dataset/name), and why they are or are not reused."""
    plan = make_plan(*parse_settings(context.args))
    found = [
        entry for group in wanted_entries(plan, _catalogue(plan), epoch=1) for entry in group if _is_of(entry, file)
    ]
    if not found:
        raise UserError(f"{file!r} is not used by this configuration; `simpletuner plan` lists every file.")
    for entry in found:
        for line in _explanation(entry):
            typer.echo(line)


def cache_folders(plan: Plan) -> list[Path]:
    """Every cache folder of a plan, once."""
    folders = [text_folder(plan)]
    for dataset in plan.datasets:
        folders += [text_folder(plan, dataset), dataset.latent_dir]
    return list(dict.fromkeys(folders))


def _catalogue(plan: Plan) -> Catalogue:
    catalogue = make_catalogue(plan)
    if catalogue is None:
        raise UserError("The checkpoint is not on this machine yet, so no entry can belong to it.")
    return catalogue


def _of_family(folder: Path, garbage: Garbage, family: str) -> Garbage:
    own = [key for key in garbage.entries if explain(folder, key).get("encoder.family", family) == family]
    return Garbage(own, garbage.leftovers, garbage.bytes)


def _is_of(entry: LatentEntry | TextEntry, file: str) -> bool:
    if isinstance(entry, TextEntry):
        return entry.source == file
    return (
        file in (entry.sample.full_name, entry.sample.name, str(entry.sample.path)) or Path(file) == entry.sample.path
    )


def _explanation(entry: LatentEntry | TextEntry) -> list[str]:
    key = entry.key.digest()
    kind = "caption" if isinstance(entry, TextEntry) else "latents"
    source = entry.source if isinstance(entry, TextEntry) else entry.sample.full_name
    path = find_entry(entry.folder, key)
    lines = [f"{kind} of {source}: {'cached in ' + str(path) if path else 'not cached'}"]
    ingredients = explain(entry.folder, key) if path else entry.key.ingredients()
    lines += [f"  {name}: {value}" for name, value in ingredients.items()]
    if path is None:
        misses = explain_miss(entry.folder, entry.key, source)
        lines += [
            f"  entry {old[:12]} is not reused, {difference}" for old, all_ in misses.items() for difference in all_
        ]
    return lines
