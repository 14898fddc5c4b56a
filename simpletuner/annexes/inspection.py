"""Inspects cache folders for `simpletuner cache verify`, `gc` and `explain`.

Nothing is deleted without `--remove`, and `gc` deletes only what it has listed.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from simpletuner.atomic import TEMPORARY_SUFFIX, write_json
from simpletuner.caching.catalogue import Catalogue, LatentEntry, TextEntry
from simpletuner.caching.entry import (
    ENTRY_NAME,
    DamagedEntryError,
    entry_path,
    list_keys,
    read_entry,
    read_provenance,
)
from simpletuner.caching.keys import CacheKey, Ingredients
from simpletuner.config.json_reader import read_stored
from simpletuner.data.dataset import Dataset
from simpletuner.errors import WriteError

VERIFYING_NAME = "verifying.json"
# An older temporary file no longer belongs to a running writer.
LEFTOVER_AGE_SECONDS = 3600.0
LEFTOVER_NAME = re.compile(rf"\.{ENTRY_NAME.pattern}\.[0-9a-f]+{re.escape(TEMPORARY_SUFFIX)}")


@dataclass
class Verification:
    """A pass over the entries of a folder, in the order of their keys.

    It is recorded in the folder, so that an interrupted pass is continued.

    Attributes:
        last: the largest key that has been read.
        damaged: reasons, by key.
    """

    last: str = ""
    damaged: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path) -> Verification:
        """The interrupted pass of a folder, or else a new one."""
        return read_stored(folder / VERIFYING_NAME, Verification) or cls()

    def remaining(self, folder: Path) -> list[str]:
        """The keys after the last one, and those of damaged entries, which may be encoded again."""
        return [key for key in list_keys(folder) if key > self.last or key in self.damaged]

    def read(self, folder: Path, keys: Sequence[str], advance: Callable[[], None]) -> None:
        """Read entries in full and record damaged ones; calls `advance` after every entry."""
        try:
            for key in keys:
                self.damaged.pop(key, None)
                try:
                    read_entry(folder, key)
                except DamagedEntryError as error:
                    self.damaged[key] = str(error)
                except FileNotFoundError:  # removed concurrently
                    pass
                self.last = max(self.last, key)
                advance()
        finally:
            with suppress(WriteError):  # a read-only folder can still be verified
                write_json(folder / VERIFYING_NAME, asdict(self), durable=False)


def forget_verifications(folders: Iterable[Path]) -> None:
    """Delete the records of a pass that has read all folders; the next one starts over."""
    for folder in folders:
        with suppress(OSError):  # there is none in a read-only folder
            (folder / VERIFYING_NAME).unlink()


@dataclass(frozen=True)
class Garbage:
    """The files that garbage collection would remove.

    Attributes:
        entries: sources of entries that are no longer used, by key.
        leftovers: temporary files of killed runs.
    """

    entries: dict[str, str]
    leftovers: list[Path]


def find_garbage(folder: Path, used: Collection[str], family: str) -> Garbage:
    """Unused entries of a family, and temporary files of killed runs.

    Args:
        used: keys of the entries that are in use.
        family: entries of other families are kept.
    """
    entries = {}
    for key in list_keys(folder):
        if key in used:
            continue
        provenance, ingredients = origin_of(folder, key)
        # Damaged entries, and features whose latents are missing, have no family and count as this
        # family's.
        if family_of(folder, ingredients, family) == family:
            entries[key] = provenance.get("source", "damaged")
    oldest = time.time() - LEFTOVER_AGE_SECONDS
    leftovers = []
    for path in sorted(folder.glob("[0-9a-f][0-9a-f]/*")):
        if LEFTOVER_NAME.fullmatch(path.name) and path.stat().st_mtime < oldest:
            leftovers.append(path)
    return Garbage(entries, leftovers)


def family_of(folder: Path, ingredients: Ingredients, otherwise: str) -> str:
    """The family whose encoder made an entry; for features, the family of their latents."""
    latents = ingredients.get("latents")
    if isinstance(latents, str):
        _, ingredients = origin_of(folder, latents)
    return str(ingredients.get("encoder.family", otherwise))


def remove_garbage(folder: Path, garbage: Garbage) -> None:
    """Delete exactly the files that `find_garbage` listed."""
    for path in [*garbage.leftovers, *(entry_path(folder, key) for key in garbage.entries)]:
        path.unlink(missing_ok=True)


def entries_of(
    file: str, latents: Iterable[LatentEntry], texts: Iterable[TextEntry], catalogue: Catalogue
) -> list[LatentEntry | TextEntry]:
    """The entries of a file, given by its path or as `dataset/name`."""
    path = Path(file).absolute()
    entries: list[LatentEntry | TextEntry] = []
    # By key, since a caption shared by files has only the first of them as its source.
    captions: set[CacheKey] = set()
    for entry in latents:
        sample = entry.sample
        if file in (sample.full_name, sample.name) or path == sample.path.absolute():
            entries.append(entry)
            for caption in sample.captions:
                captions.add(catalogue.text(sample.dataset_id, caption, sample.partner).key)
    entries += [text for text in texts if text.source == file or text.key in captions]
    return entries


def why_left_out(file: str, datasets: Iterable[Dataset]) -> str | None:
    """Why a file, given as for `entries_of`, has no entries; None unless a dataset rejects it."""
    path = Path(file).absolute()
    for dataset in datasets:
        for rejected in dataset.rejected:
            if file in (f"{rejected.dataset_id}/{rejected.name}", rejected.name):
                return rejected.detail
            if path == (dataset.folder.root / rejected.name).absolute():
                return rejected.detail
    return None


def explain(entry: LatentEntry | TextEntry) -> Iterator[str]:
    """Explain whether an entry is cached, and what it depends on.

    Of an entry that is not cached, also why other entries of its source are not reused.
    """
    title = f"latents of {entry.source}"
    if isinstance(entry, TextEntry):
        title = f"caption of {entry.caption!r}, {entry.source}"
    path = entry_path(entry.folder, entry.key.digest())
    if not path.is_file():
        yield f"{title}: not cached"
        for name, value in entry.key.ingredients().items():
            yield f"  {name}: {value}"
        for key, differences in explain_miss(entry.folder, entry.key, entry.source).items():
            for difference in differences:
                yield f"  entry {key[:12]} is not reused, {difference}"
        return
    yield f"{title}: cached in {path}"
    provenance, ingredients = origin_of(entry.folder, entry.key.digest())
    if not provenance:
        yield "  it is damaged; the next run encodes it again"
    for name, value in {**provenance, **ingredients}.items():
        yield f"  {name}: {value}"


def origin_of(folder: Path, key: str) -> tuple[dict[str, str], Ingredients]:
    """The provenance of an entry, and the ingredients of its key.

    Both are empty if the entry is missing or damaged.
    """
    try:
        provenance = read_provenance(entry_path(folder, key))
    except (DamagedEntryError, FileNotFoundError):
        return {}, {}
    return provenance, json.loads(provenance.pop("ingredients", "{}"))


def explain_miss(folder: Path, missing: CacheKey, source: str) -> dict[str, list[str]]:
    """Explain a cache miss: how cached entries of the same source differ from the missing one.

    Args:
        source: as passed to `provenance_of`.

    Returns:
        differences by key of the cached entry, fewest first; empty if the source was never cached.
    """
    ingredients = missing.ingredients()
    misses: dict[str, list[str]] = {}
    for key in list_keys(folder):
        provenance, cached = origin_of(folder, key)
        if provenance.get("source") == source and cached.get("kind") == ingredients["kind"]:
            misses[key] = compare(cached, ingredients)
    return dict(sorted(misses.items(), key=lambda item: len(item[1])))


def compare(cached: Ingredients, missing: Ingredients) -> list[str]:
    """The ingredients in which two keys differ, sorted by name; absent ones count as None."""
    differences = []
    for name in sorted(cached.keys() | missing.keys()):
        old = cached.get(name)
        new = missing.get(name)
        if old != new:
            differences.append(f"{name}: cached {old!r}, wanted {new!r}")
    return differences
