"""Inspect a cache folder: the work of `simpletuner cache verify`, `gc` and `explain`. Free of torch.

Nothing is deleted unless asked for, and `gc` deletes only what it has listed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import TEMPORARY_SUFFIX, write_atomically
from simpletuner.caching.entry import (
    ENTRY_NAME,
    DamagedEntryError,
    entry_path,
    find_entry,
    list_keys,
    read_entry,
    read_provenance,
)
from simpletuner.caching.keys import CacheKey, Ingredients
from simpletuner.errors import WriteError

VERIFIED_NAME = "verified.json"
SAVED_EVERY = 5.0  # seconds
# A temporary file this old belongs to no running writer.
LEFTOVER_AGE_SECONDS = 3600.0
# Temporary files, and uncompressed entries in the format of older versions.
LEFTOVER_NAME = re.compile(
    rf"\.{ENTRY_NAME.pattern}\.[0-9a-f]+{re.escape(TEMPORARY_SUFFIX)}|[0-9a-f]{{64}}\.safetensors"
)


@dataclass
class Verification:
    """A pass over all entries of a folder, recorded in the folder so that it can resume.

    Attributes:
        started, finished: when; `finished` is None until the last entry has been read.
        last: the largest key that has been read; entries are read in the order of their keys.
        entries: number of entries read.
        damaged: faults of damaged entries, by key.
    """

    started: datetime = field(default_factory=partial(datetime.now, UTC))
    finished: datetime | None = None
    last: str = ""
    entries: int = 0
    damaged: dict[str, str] = field(default_factory=dict)

    def remaining(self, folder: Path) -> list[str]:
        """The keys after the last one read, and earlier keys that were damaged or written since."""
        return [key for key in list_keys(folder) if key > self.last or key in self.damaged or self._is_new(folder, key)]

    def _is_new(self, folder: Path, key: str) -> bool:
        path = find_entry(folder, key)
        return path is not None and path.stat().st_mtime > self.started.timestamp()

    def read(self, folder: Path, keys: Sequence[str], advance: Callable[[], None]) -> None:
        """Read entries in full and record the damaged ones; calls `advance` after each."""
        saved = time.monotonic()
        try:
            for key in keys:
                self._read(folder, key)
                advance()
                if time.monotonic() - saved > SAVED_EVERY:
                    self._save(folder)
                    saved = time.monotonic()
            self.finished = datetime.now(UTC)
        finally:
            self._save(folder)

    def _read(self, folder: Path, key: str) -> None:
        self.damaged.pop(key, None)
        try:
            read_entry(entry_path(folder, key), key)
        except DamagedEntryError as error:
            self.damaged[key] = str(error)
        except FileNotFoundError:  # removed meanwhile
            return
        self.entries, self.last = self.entries + (key > self.last), max(self.last, key)

    def _save(self, folder: Path) -> None:
        with suppress(WriteError):  # a read-only folder can still be verified
            write_atomically(folder / VERIFIED_NAME, _VERIFICATION.dump_json(self), durable=False)


_VERIFICATION = TypeAdapter(Verification)


def begin_verifications(folders: Iterable[Path]) -> dict[Path, Verification]:
    """A verification per folder: the recorded ones if any was interrupted, else new ones."""
    known: dict[Path, Verification] = {}
    for folder in folders:
        known[folder] = Verification()
        with suppress(OSError, ValidationError):
            known[folder] = _VERIFICATION.validate_json((folder / VERIFIED_NAME).read_bytes())
    if all(each.finished or not each.last for each in known.values()):
        return {folder: Verification() for folder in known}
    return known


@dataclass(frozen=True)
class Garbage:
    """The files that garbage collection would remove.

    Attributes:
        entries: keys that are no longer wanted.
        leftovers: temporary files of killed runs.
        bytes: how much removing both would free.
    """

    entries: list[str]
    leftovers: list[Path]
    bytes: int


@dataclass(frozen=True)
class Difference:
    """An ingredient that differs between a cached entry and the wanted one."""

    ingredient: str
    cached: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{self.ingredient}: cached {self.cached!r}, wanted {self.wanted!r}"


def find_garbage(folder: Path, wanted: Collection[str]) -> Garbage:
    """Unwanted entries, and temporary files of killed runs.

    Args:
        wanted: keys of all configs that use the folder.
    """
    known = frozenset(wanted)
    entries = [key for key in list_keys(folder) if key not in known]
    oldest = time.time() - LEFTOVER_AGE_SECONDS
    known_names = (path for path in sorted(folder.glob("[0-9a-f][0-9a-f]/*")) if LEFTOVER_NAME.fullmatch(path.name))
    leftovers = [path for path in known_names if path.stat().st_mtime < oldest]
    files = [*leftovers, *(path for key in entries if (path := find_entry(folder, key)) is not None)]
    return Garbage(entries, leftovers, sum(path.stat().st_size for path in files))


def remove_garbage(folder: Path, garbage: Garbage) -> None:
    """Delete exactly the files that `find_garbage` listed."""
    for path in garbage.leftovers:
        path.unlink(missing_ok=True)
    for key in garbage.entries:
        entry_path(folder, key).unlink(missing_ok=True)


def explain(folder: Path, key: str) -> dict[str, Any]:
    """The origin of an entry: its source, and every ingredient of its key.

    Raises:
        KeyError: there is no such entry.
        DamagedEntryError: its header cannot be read.
    """
    path = find_entry(folder, key)
    if path is None:
        raise KeyError(key)
    provenance = read_provenance(path)
    ingredients = json.loads(provenance.pop("ingredients", "{}"))
    return {**provenance, **ingredients}


def explain_miss(folder: Path, wanted: CacheKey, source: str) -> dict[str, list[Difference]]:
    """Why an entry is missing: how each entry of the same source differs from the wanted one.

    Args:
        source: as passed to `provenance_of`.

    Returns:
        differences by key of the cached entry, fewest first; empty if the source was never cached.
    """
    found: dict[str, list[Difference]] = {}
    for key, ingredients in _entries_of(folder, source):
        if ingredients.get("kind") == wanted.ingredients()["kind"]:
            found[key] = compare(ingredients, wanted.ingredients())
    return dict(sorted(found.items(), key=lambda item: len(item[1])))


def compare(cached: Ingredients, wanted: Ingredients) -> list[Difference]:
    """The ingredients in which two keys differ, sorted by name; a missing one counts as None."""
    names: Iterable[str] = sorted(cached.keys() | wanted.keys())
    pairs = [(name, cached.get(name), wanted.get(name)) for name in names]
    return [Difference(name, old, new) for name, old, new in pairs if old != new]


def _entries_of(folder: Path, source: str) -> Iterator[tuple[str, Ingredients]]:
    """Key and ingredients of every entry of a source; skips unreadable entries, which `Verification` reports."""
    for key in list_keys(folder):
        path = find_entry(folder, key)
        try:
            provenance = read_provenance(path) if path is not None else {}
        except DamagedEntryError:
            continue
        if provenance.get("source") == source and "ingredients" in provenance:
            yield key, json.loads(provenance["ingredients"])
