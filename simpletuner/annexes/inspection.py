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
from simpletuner.data.sample import Sample
from simpletuner.errors import WriteError

VERIFYING_NAME = "verifying.json"
# An older temporary file no longer belongs to a running writer.
LEFTOVER_AGE_SECONDS = 3600.0
LEFTOVER_NAME = re.compile(rf"\.{ENTRY_NAME.pattern}\.[0-9a-f]+{re.escape(TEMPORARY_SUFFIX)}")


@dataclass
class Verification:
    """A pass over the entries of a folder, in the order of their keys; recorded there when it is
    interrupted.

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
        """The keys after the last one read, and those of damaged entries, which may have been
        encoded again.
        """
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
    """Delete the records of a pass that has read all folders, so that the next one begins anew."""
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


def find_garbage(folder: Path, wanted: Collection[str], family: str) -> Garbage:
    """Unused entries of a family, and temporary files of killed runs.

    Args:
        wanted: keys of the entries that are in use.
        family: entries of other families are kept.
    """
    origins = {key: origin_of(folder, key) for key in list_keys(folder) if key not in wanted}
    entries = {
        key: provenance.get("source", "damaged")
        for key, (provenance, ingredients) in origins.items()
        # Damaged entries, and features whose latents are missing, have no family and count as this
        # family's.
        if family_of(folder, ingredients, family) == family
    }
    oldest = time.time() - LEFTOVER_AGE_SECONDS
    leftovers = (
        path
        for path in sorted(folder.glob("[0-9a-f][0-9a-f]/*"))
        if LEFTOVER_NAME.fullmatch(path.name)
    )
    return Garbage(entries, [path for path in leftovers if path.stat().st_mtime < oldest])


def family_of(folder: Path, ingredients: Ingredients, otherwise: str) -> str:
    """The family whose encoder made an entry; for features, the family of their latents."""
    latents = ingredients.get("latents")
    encoded = origin_of(folder, latents)[1] if isinstance(latents, str) else ingredients
    return str(encoded.get("encoder.family", otherwise))


def remove_garbage(folder: Path, garbage: Garbage) -> None:
    """Delete exactly the files that `find_garbage` listed."""
    for path in [*garbage.leftovers, *(entry_path(folder, key) for key in garbage.entries)]:
        path.unlink(missing_ok=True)


def entries_of(
    file: str, latents: Iterable[LatentEntry], texts: Iterable[TextEntry], catalogue: Catalogue
) -> list[LatentEntry | TextEntry]:
    """The entries of a file, given by its path or as `dataset/name`."""
    place = Path(file).absolute()
    text_of = catalogue.text

    def shows(sample: Sample) -> bool:
        return file in (sample.full_name, sample.name) or place == sample.path.absolute()

    encoded = [entry for entry in latents if shows(entry.sample)]
    samples = [entry.sample for entry in encoded]
    # By key, since a caption shared by files has only the first of them as its source.
    captions = {
        text_of(sample.dataset_id, text, sample.partner).key
        for sample in samples
        for text in sample.captions
    }
    return [*encoded, *(entry for entry in texts if entry.source == file or entry.key in captions)]


def why_left_out(file: str, datasets: Iterable[Dataset]) -> str | None:
    """Why a file, given as for `entries_of`, has no entries; None unless a dataset rejects it."""
    place = Path(file).absolute()
    for each, root in ((each, data.folder.root) for data in datasets for each in data.rejected):
        if (
            file in (f"{each.dataset_id}/{each.name}", each.name)
            or place == (root / each.name).absolute()
        ):
            return each.detail
    return None


def explain(entry: LatentEntry | TextEntry) -> Iterator[str]:
    """Explain whether an entry is cached, what it depends on, and why other entries of its source
    are not reused.
    """
    path = entry_path(entry.folder, entry.key.digest())
    is_cached = path.is_file()
    what = f"caption of {entry.caption!r}, " if isinstance(entry, TextEntry) else "latents of "
    yield f"{what}{entry.source}: {f'cached in {path}' if is_cached else 'not cached'}"
    if not is_cached:
        yield from (f"  {name}: {value}" for name, value in entry.key.ingredients().items())
        for key, differences in explain_miss(entry.folder, entry.key, entry.source).items():
            yield from (
                f"  entry {key[:12]} is not reused, {difference}" for difference in differences
            )
        return
    provenance, ingredients = origin_of(entry.folder, entry.key.digest())
    if not provenance:
        yield "  it is damaged; the next run encodes it again"
    yield from (f"  {name}: {value}" for name, value in {**provenance, **ingredients}.items())


def origin_of(folder: Path, key: str) -> tuple[dict[str, str], Ingredients]:
    """The provenance of an entry, and the ingredients of its key; both empty if it is missing or
    damaged.
    """
    try:
        provenance = read_provenance(entry_path(folder, key))
    except (DamagedEntryError, FileNotFoundError):
        return {}, {}
    return provenance, json.loads(provenance.pop("ingredients", "{}"))


def explain_miss(folder: Path, wanted: CacheKey, source: str) -> dict[str, list[str]]:
    """Explain a cache miss: how cached entries of the same source differ from the wanted one.

    Args:
        source: as passed to `provenance_of`.

    Returns:
        differences by key of the cached entry, fewest first; empty if the source was never cached.
    """
    ingredients = wanted.ingredients()
    misses: dict[str, list[str]] = {}
    for key in list_keys(folder):
        provenance, cached = origin_of(folder, key)
        if provenance.get("source") == source and cached.get("kind") == ingredients["kind"]:
            misses[key] = compare(cached, ingredients)
    return dict(sorted(misses.items(), key=lambda item: len(item[1])))


def compare(cached: Ingredients, wanted: Ingredients) -> list[str]:
    """The ingredients in which two keys differ, sorted by name; missing ingredients count as
    None.
    """
    pairs = {
        name: (cached.get(name), wanted.get(name)) for name in sorted(cached.keys() | wanted.keys())
    }
    return [
        f"{name}: cached {old!r}, wanted {new!r}"
        for name, (old, new) in pairs.items()
        if old != new
    ]
