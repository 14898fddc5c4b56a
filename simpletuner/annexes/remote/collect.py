"""Turns remote datasets into folders: lists and downloads their files, which are then used like local ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from simpletuner.annexes.display.progress import shown_events
from simpletuner.annexes.remote.hub_rows import list_rows
from simpletuner.annexes.remote.store import Offer, Store, UnfetchedError
from simpletuner.annexes.remote.web_table import list_table
from simpletuner.config.datasets import DatasetConfig
from simpletuner.data.discovery import Scan, classify, wanted_suffixes
from simpletuner.data.entries import DataContext
from simpletuner.errors import Kind, Problem, Problems, UserError

LISTERS = {"csv": list_table, "huggingface": list_rows}
RETRY = "; --retry-failed tries again"


def collect(
    entries: Sequence[DatasetConfig], context: DataContext, problems: Problems, *, fetches: bool = True
) -> dict[str, Scan]:
    """List the files of every remote entry, by id, after downloading missing ones.

    Args:
        entries: dataset entries with defaults filled in.
        problems: errors are added to it. After a fatal one, nothing is downloaded.
        fetches: download missing files; otherwise no server is contacted, and only downloaded files are listed.
    """
    offers: dict[str, tuple[Store, Offer]] = {}
    for entry in entries:
        if any(problem.fatal and problem.where.startswith(entry.id) for problem in problems):
            continue
        folder, wanted = Path(entry.instance_data_dir or ""), wanted_suffixes(entry, context)
        forgiven = "allow_private_urls" if entry.allow_private_urls else ""
        store = Store(folder, wanted, context.defaults.retry_failed, forgiven, fetches)
        try:
            offers[entry.id] = store, LISTERS[entry.type](entry, store, problems)
        except UserError as error:
            kind: Kind | None = "unfetched" if isinstance(error, UnfetchedError) else None
            problems.error(entry.id, str(error), kind=kind)
    if problems.are_fatal:
        return {}
    return {name: _download(name, *offer, problems) for name, offer in offers.items()}


# For plans that must not contact a server.
collect_cached = partial(collect, fetches=False)


def _download(dataset: str, store: Store, offer: Offer, problems: Problems) -> Scan:
    """Download missing files; returns a listing as of a folder, with the reasons of failed downloads."""
    missing = store.missing(offer.items)
    if missing and not store.fetches:
        error = UnfetchedError(f"{len(missing)} of {len(offer.items)} files are")
        # Some of the files are enough for a plan.
        problems.append(Problem(dataset, str(error), fatal=len(missing) == len(offer.items), kind="unfetched"))
    elif missing:
        try:  # progress goes to stderr, since stdout may be piped
            title, count = f"Downloading {dataset}", len(missing)
            with shown_events(sys.stderr) as events, events.phase(title, count, "files") as phase:
                store.fetch(missing, phase)
        except UserError as error:
            problems.error(dataset, str(error))
    reasons = {item.key: store.failed[item.key].reason for item in offer.items if item.key in store.failed}
    failed = {key: ("not downloaded", reason + RETRY) for key, reason in reasons.items()}
    names = {name: item.key for item in offer.items if (name := store.name_of(item)) is not None}
    listing = classify([(name, None) for name in names], store.wanted)
    table = {name: offer.captions[key] for name, key in names.items() if key in offer.captions}
    return replace(listing, ignored={**listing.ignored, **offer.ignored, **failed}, table=table, origins=names)
