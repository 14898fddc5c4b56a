"""Turns remote datasets into folders, whose files are then used like local ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from simpletuner.annexes.display.progress import shown_events
from simpletuner.annexes.remote.store import Item, RemoteFiles, Store, UnfetchedError
from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.remote import SOURCES
from simpletuner.data.discovery import Scan, accepted_suffixes, classify
from simpletuner.data.entries import DataContext
from simpletuner.errors import Kind, Problem, Problems, UserError

# A function that lists the files of a dataset; each source in config/remote.py names one.
Lister = Callable[[DatasetConfig, Store, Problems], RemoteFiles]
RETRY = "; --retry-failed tries again"


def collect(
    entries: Sequence[DatasetConfig],
    context: DataContext,
    problems: Problems,
    *,
    fetches: bool = True,
) -> dict[str, Scan]:
    """List the files of every remote entry, by id, after downloading missing ones.

    Args:
        entries: dataset entries with defaults filled in.
        problems: errors are added to it. After a fatal one, nothing is downloaded.
        fetches: download missing files; otherwise no server is contacted, and only downloaded files
            are listed.
    """
    listed: dict[str, tuple[Store, RemoteFiles]] = {}
    for entry in entries:
        if _is_refused(entry, problems):
            continue
        store = _open_store(entry, context, fetches=fetches)
        try:
            lister: Lister = resolve_name(SOURCES[entry.type].lister)
            listed[entry.id] = store, lister(entry, store, problems)
        except UserError as error:
            kind: Kind | None = "unfetched" if isinstance(error, UnfetchedError) else None
            problems.error(entry.id, str(error), kind=kind)
    if problems.are_fatal:
        return {}
    scans = {}
    for name, (store, files) in listed.items():
        scans[name] = _download(name, store, files, problems)
    return scans


# For plans that must not contact a server.
collect_cached = partial(collect, fetches=False)


def _is_refused(entry: DatasetConfig, problems: Problems) -> bool:
    """Whether an entry has a fatal problem; listing its files would only add further ones."""
    for problem in problems:
        of_entry = problem.where == entry.id or problem.where.startswith(f"{entry.id}.")
        if problem.fatal and of_entry:
            return True
    return False


def _open_store(entry: DatasetConfig, context: DataContext, *, fetches: bool) -> Store:
    """The download folder of an entry."""
    return Store(
        root=Path(entry.instance_data_dir or ""),
        accepted=accepted_suffixes(entry, context),
        retry_failed=context.defaults.retry_failed,
        forgiven="allow_private_urls" if entry.allow_private_urls else "",
        fetches=fetches,
    )


def _download(dataset: str, store: Store, files: RemoteFiles, problems: Problems) -> Scan:
    """Download missing files; returns a listing as of a folder.

    Failed downloads are listed among the ignored files, with their reasons.
    """
    missing = store.missing(files.items)
    if missing and not store.fetches:
        error = UnfetchedError(f"{len(missing)} of {len(files.items)} files are")
        # Some of the files are enough for a plan.
        are_all = len(missing) == len(files.items)
        problems.append(Problem(dataset, str(error), fatal=are_all, kind="unfetched"))
    elif missing:
        _fetch(dataset, store, missing, problems)

    failed: dict[str, tuple[str, str]] = {}
    keys: dict[str, str] = {}  # of downloaded files, by their names
    for item in files.items:
        if item.key in store.failed:
            failed[item.key] = ("not downloaded", store.failed[item.key].reason + RETRY)
        name = store.name_of(item)
        if name is not None:
            keys[name] = item.key
    listing = classify([(name, None) for name in keys], store.accepted)
    ignored = {**listing.ignored, **files.ignored, **failed}
    table = {name: files.captions[key] for name, key in keys.items() if key in files.captions}
    return replace(listing, ignored=ignored, table=table, origins=keys)


def _fetch(dataset: str, store: Store, missing: Sequence[Item], problems: Problems) -> None:
    """Download files with a progress bar."""
    title = f"Downloading {dataset}"
    try:
        # Progress goes to stderr, since stdout may be piped.
        with (
            shown_events(sys.stderr) as events,
            events.phase(title, len(missing), "files") as phase,
        ):
            store.fetch(missing, phase)
    except UserError as error:
        problems.error(dataset, str(error))
