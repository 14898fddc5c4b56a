"""What is known of each file: its identity and its size, kept in an index so that it is read only once.

The index lies in the dataset's latent cache folder. It holds nothing that cannot be found out again, so a damaged or
foreign one is ignored.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import write_atomically

from .buckets import Size
from .clips import is_clip, probe_clip
from .media import probe
from .structure import MediaError
from .timing import ClipFacts

INDEX_NAME = "index.json"
# 2: clips with HDR or a mirroring matrix are refused.
INDEX_VERSION = 2


@dataclass(frozen=True)
class FileFacts:
    """What reading a file once has told.

    Attributes:
        size, mtime_ns: bytes and time of the last change; when both are as before, the file was not changed.
        content: sha256 of the bytes in hex; empty when the file could not be read.
        width, height: pixels as shown, after any rotation; 0 with a problem.
        problem: why it cannot be used, or None.
        captions: the captions it was last used with, for when the files themselves are gone.
        clip: length and rate; None for pictures.
    """

    size: int
    mtime_ns: int
    content: str
    width: int = 0
    height: int = 0
    problem: str | None = None
    captions: tuple[str, ...] = ()
    clip: ClipFacts | None = None

    @property
    def picture_size(self) -> Size:
        return self.width, self.height


@dataclass(frozen=True)
class _Index:
    version: int
    root: str
    files: dict[str, FileFacts]


_INDEX = TypeAdapter(_Index)


def inspect_files(
    root: Path, names: Iterable[str], known: Mapping[str, FileFacts], *, workers: int = 4
) -> dict[str, FileFacts]:
    """Facts of each file, read from the disk only where they are not known or the file has changed.

    Args:
        root: the dataset's folder.
        names: paths below it.
        known: the index of the last run.
        workers: threads, at most the machine's cores.
    """
    names = list(names)
    with ThreadPoolExecutor(max(1, min(workers, os.cpu_count() or 1))) as pool:
        facts = pool.map(lambda name: _inspect(root / name, known.get(name)), names)
        return dict(zip(names, facts, strict=True))


def _inspect(path: Path, known: FileFacts | None) -> FileFacts:
    try:
        status = path.stat()
        if known is not None and (known.size, known.mtime_ns) == (status.st_size, status.st_mtime_ns):
            return known
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return FileFacts(0, 0, "", problem=f"cannot be read: {error.strerror}")
    facts = FileFacts(status.st_size, status.st_mtime_ns, content)
    try:
        clip = probe_clip(path) if is_clip(path) else None
        width, height = (clip.width, clip.height) if clip else probe(path)
    except MediaError as error:
        return replace(facts, problem=str(error))
    return replace(facts, width=width, height=height, clip=clip)


def load_index(folder: Path, root: Path) -> dict[str, FileFacts]:
    """The index in a latent cache folder; empty when there is none, it is damaged or of another dataset folder."""
    try:
        index = _INDEX.validate_json((folder / INDEX_NAME).read_bytes())
    except (OSError, ValidationError):
        return {}
    return index.files if (index.version, index.root) == (INDEX_VERSION, str(root.absolute())) else {}


def save_index(folder: Path, root: Path, facts: Mapping[str, FileFacts]) -> None:
    """Write the index atomically; files that could not be read are left out, so that they are tried again.

    Raises:
        DiskFullError: no space left; the index that was there is kept.
    """
    files = {name: fact for name, fact in facts.items() if fact.content}
    index = _Index(INDEX_VERSION, str(root.absolute()), files)
    write_atomically(folder / INDEX_NAME, _INDEX.dump_json(index), durable=False)
