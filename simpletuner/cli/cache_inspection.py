"""What the commands of `simpletuner cache` report about the entries of a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simpletuner.caching.catalogue import AnyEntry, LatentEntry, TextEntry
from simpletuner.caching.entry import DamagedEntryError, find_entry
from simpletuner.caching.inspect import (
    Garbage,
    Verification,
    begin_verifications,
    explain,
    explain_miss,
    find_garbage,
    remove_garbage,
)
from simpletuner.data.sample import Sample
from simpletuner.errors import UserError
from simpletuner.plan.build import Plan
from simpletuner.plan.entries import Listing, list_entries, make_catalogue, text_folder
from simpletuner.reporting.progress import shown_events


def verify_caches(plan: Plan) -> Iterator[str]:
    """Read every entry and name the damaged ones.

    Raises:
        UserError: there are damaged entries.
    """
    folders = cache_folders(plan)
    number = 0
    for folder, verification in begin_verifications(folders).items():
        damaged = _verify(folder, verification)
        number += len(damaged)
        yield from (f"{folder}/{key}: {reason}" for key, reason in damaged.items())
    if number:
        raise UserError(f"{number} damaged entries; the next run encodes them again.")
    yield f"Every entry in {', '.join(map(str, folders))} is intact." if folders else "There are no caches yet."


def _verify(folder: Path, verification: Verification) -> dict[str, str]:
    """What is wrong with the damaged entries of a folder, by key; progress goes to stderr."""
    with shown_events(sys.stderr) as events:
        if verification.last:
            events.say(f"Continuing after {verification.entries:,} entries, read since {verification.started:%c} UTC.")
        keys = verification.remaining(folder)
        with events.phase(f"Verifying {folder}", len(keys), "entries") as phase:
            verification.read(folder, keys, phase.advance)
    return verification.damaged


def clean_caches(plan: Plan, *, remove: bool) -> Iterator[str]:
    """List the entries that the plan does not refer to, and delete them with `remove`."""
    listing = _listing(plan)
    entries: list[AnyEntry] = [*listing.texts, *listing.latents, *listing.features]
    wanted = {entry.key.digest() for entry in entries}
    total = 0
    for folder in cache_folders(plan):
        garbage = _of_family(folder, find_garbage(folder, wanted), plan.spec.name)
        for key in garbage.entries:
            yield f"{folder}/{key}: {_origin(folder, key).get('source', 'damaged')}"
        total += len(garbage.entries) + len(garbage.leftovers)
        if remove:
            remove_garbage(folder, garbage)
    yield f"{total} entries and leftovers {'removed' if remove else 'found; --remove deletes them'}."


def explain_caching(plan: Plan, file: str) -> Iterator[str]:
    """Which entries belong to a file, and why they are or are not reused.

    Raises:
        UserError: the configuration does not use the file.
    """
    listing = _listing(plan)
    own = [entry for entry in listing.latents if _is_of(entry.sample, file)]
    samples, text_of = [entry.sample for entry in own], listing.catalogue.text
    captions = {text_of(one.dataset_id, text, one.partner).key for one in samples for text in one.captions}
    found: list[LatentEntry | TextEntry] = [*own]
    found += [entry for entry in listing.texts if entry.source == file or entry.key in captions]
    if not found:
        raise UserError(f"{file!r} is not used by this configuration; `simpletuner plan` lists every file.")
    for entry in found:
        yield from _explanation(entry)


def cache_folders(plan: Plan) -> list[Path]:
    """Every existing cache folder of a plan, without duplicates."""
    folders = [text_folder(plan)]
    for dataset in plan.datasets:
        folders += [text_folder(plan, dataset), dataset.latent_dir]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def _listing(plan: Plan) -> Listing:
    catalogue = make_catalogue(plan)
    if catalogue is None:
        raise UserError("The checkpoint is not on this machine yet, so no entry can belong to it.")
    return list_entries(plan, catalogue)


def _of_family(folder: Path, garbage: Garbage, family: str) -> Garbage:
    own = [key for key in garbage.entries if _origin(folder, key).get("encoder.family", family) == family]
    return Garbage(own, garbage.leftovers, garbage.bytes)


def _origin(folder: Path, key: str) -> dict[str, Any]:
    """Where an entry came from; empty if it is too damaged to read."""
    try:
        return explain(folder, key)
    except DamagedEntryError:
        return {}


def _is_of(sample: Sample, file: str) -> bool:
    return file in (sample.full_name, sample.name) or Path(file).absolute() == sample.path.absolute()


def _explanation(entry: LatentEntry | TextEntry) -> list[str]:
    key = entry.key.digest()
    kind = "caption" if isinstance(entry, TextEntry) else "latents"
    source = entry.source if isinstance(entry, TextEntry) else entry.sample.full_name
    what = f"{entry.caption!r}, {source}" if isinstance(entry, TextEntry) else source
    path = find_entry(entry.folder, key)
    lines = [f"{kind} of {what}: {'cached in ' + str(path) if path else 'not cached'}"]
    ingredients = _origin(entry.folder, key) if path else entry.key.ingredients()
    if path and not ingredients:
        lines.append("  it is damaged; the next run encodes it again")
    lines += [f"  {name}: {value}" for name, value in ingredients.items()]
    if path is None:
        misses = explain_miss(entry.folder, entry.key, source)
        lines += [
            f"  entry {old[:12]} is not reused, {difference}" for old, all_ in misses.items() for difference in all_
        ]
    return lines
