"""The index of a dataset folder: facts of its files, which are kept beside the latent cache.

With it, an unchanged file is read only once. It can always be rebuilt; a damaged index, or one of
another folder, is ignored.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import open_atomically
from simpletuner.config.types import Size
from simpletuner.data import files
from simpletuner.data.clips import ClipFacts, is_clip, probe_clip
from simpletuner.data.pictures import inspect
from simpletuner.hashing import hash_bytes

INDEX_NAME = "index.json"
# Increment it when files must be read again.
# 2: clips with HDR or a mirroring matrix are refused.
# 3: checksums of PNG files; colours of clips.
# 4: AVIF and HEIC.
# 5: colours of pictures, and clean apertures; HDR pictures are refused; clips are read by PyAV.
INDEX_VERSION = 5
# The first version whose pictures are read with `Sample.conversions`, and whose clips have a reader
# in their key.
CONVERSIONS_SINCE = 5
AT_ONCE = 32  # files per thread-pool task; one task per file would cost more than the check


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts of one file, read once.

    Attributes:
        size, mtime_ns: bytes and modification time; the file counts as unchanged if both are.
        content: SHA-256 of the bytes in hex; empty if the file could not be read.
        width, height: pixels as shown, after any rotation; 0 with a problem.
        problem: why the file cannot be used, or None.
        reason: category of the problem, as in `Rejected`.
        captions: content of the caption file at `stamp`; without a stamp the captions that were
            used last, in case the file is gone.
        clip: length and rate; None for pictures.
        white: for a mask, the settings it was last read with and its white share.
        stamp: `captions.caption_stamp` of the caption file when it was read, or None.
        is_one_text: the lines of the caption file seem to be parts of one text.
        conversions: of a picture, see `Sample.conversions`.
    """

    size: int
    mtime_ns: int
    content: str
    width: int = 0
    height: int = 0
    problem: str | None = None
    captions: tuple[str, ...] = ()
    clip: ClipFacts | None = None
    white: tuple[str, float] | None = None
    stamp: str | None = None
    reason: str = ""
    is_one_text: bool = False
    conversions: tuple[str, ...] = ()

    @property
    def picture_size(self) -> Size:
        return Size(self.width, self.height)


NO_FACTS = FileFacts(size=0, mtime_ns=0, content="")  # of a file that was not read


@dataclass(frozen=True)
class _Index:
    """One line of the index: `PER_LINE` files, which bounds the memory needed to parse it."""

    version: int
    root: str
    files: dict[str, FileFacts]


_INDEX = TypeAdapter(_Index)
PER_LINE = 1000


def inspect_files(
    root: Path, names: Iterable[str], known: Mapping[str, FileFacts], *, workers: int = 4
) -> dict[str, FileFacts]:
    """Facts of every file; only new and changed files are read.

    Args:
        root: the dataset's folder.
        names: paths below it.
        known: the index of the last run.
        workers: number of threads, limited to the machine's cores.
    """
    names = list(names)
    folder = str(root)
    parts = (names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE))

    def inspect_part(part: list[str]) -> list[FileFacts]:
        return [_facts_of(f"{folder}/{name}", known.get(name)) for name in part]

    # Threads suffice: reading and hashing release the GIL.
    with ThreadPoolExecutor(max(1, min(workers, os.cpu_count() or 1))) as pool:
        facts = chain.from_iterable(pool.map(inspect_part, parts))
        return dict(zip(names, facts, strict=True))


def _facts_of(path: str, known: FileFacts | None) -> FileFacts:
    """The known facts of an unchanged file, else those of the file as it is now."""
    if known is not None:
        with suppress(OSError):  # `_inspect` reports it
            status = os.stat(path)  # noqa: PTH116 - pathlib takes three times as long
            is_unchanged = (status.st_size, status.st_mtime_ns) == (known.size, known.mtime_ns)
            # Indexes of earlier versions have problems without a reason.
            is_complete = bool(known.reason) or not known.problem
            if is_unchanged and is_complete and stat.S_ISREG(status.st_mode):
                return known
    return _inspect(Path(path))


def _inspect(path: Path) -> FileFacts:
    """Read a file and check that it can be trained."""
    facts = NO_FACTS
    try:
        if is_clip(path):
            size, mtime_ns = files.check_regular(path, files.LARGEST_CLIP)
            # In chunks, since a clip may not fit into memory.
            facts = FileFacts(size, mtime_ns, files.content_hash(path))
            clip = probe_clip(path)
            return replace(facts, width=clip.width, height=clip.height, clip=clip)
        size, mtime_ns = files.check_regular(path, files.LARGEST_PICTURE)
        # One read for the hash and the inspection.
        data = files.read_file(path, files.LARGEST_PICTURE)
        facts = FileFacts(size, mtime_ns, hash_bytes(data))
        picture = inspect(data)
        return replace(
            facts, width=picture.width, height=picture.height, conversions=picture.conversions
        )
    except files.MediaError as error:
        if isinstance(error, files.UnreadableError):
            facts = NO_FACTS  # is not saved, so the next run tries again
        return replace(facts, problem=str(error), reason=error.reason)


def load_index(folder: Path, root: Path) -> dict[str, FileFacts]:
    """Read the index of a latent cache folder.

    Empty if it is missing, damaged or belongs to another dataset folder.
    """
    facts: dict[str, FileFacts] = {}
    try:
        with (folder / INDEX_NAME).open("rb") as lines:
            for line in map(_INDEX.validate_json, lines):
                if (line.version, line.root) != (INDEX_VERSION, str(root.absolute())):
                    return {}
                facts |= line.files
    except (OSError, ValidationError):
        return {}
    return facts


def index_version(folder: Path) -> int | None:
    """The version that wrote the index of a latent cache folder; None without one."""
    try:
        with (folder / INDEX_NAME).open("rb") as index:
            version = re.match(rb'\{"version":(\d+),', index.read(64))
    except OSError:
        return None
    if version is None:
        return None
    return int(version[1])


def save_index(folder: Path, root: Path, facts: Mapping[str, FileFacts]) -> None:
    """Write the index atomically.

    Raises:
        DiskFullError: no space left; the previous index is kept.
    """
    names = list(facts)
    # No fsync: a torn index is ignored and rebuilt.
    with open_atomically(folder / INDEX_NAME, durable=False) as index:
        for start in range(0, len(names), PER_LINE):
            part = {name: facts[name] for name in names[start : start + PER_LINE]}
            line = _Index(INDEX_VERSION, str(root.absolute()), part)
            index.write(_INDEX.dump_json(line, exclude_defaults=True) + b"\n")
