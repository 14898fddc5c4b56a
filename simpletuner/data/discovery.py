"""Lists a dataset folder: its files with their facts, and their caption files.

File facts (content hash, size, problem) are kept in an index beside the latent cache, so that an unchanged file is read
only once. The index can always be rebuilt; a damaged index, or one of another folder, is ignored.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import open_atomically
from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.config.values import Size, named_by, read_json
from simpletuner.data import files
from simpletuner.data.clips import CLIP_SUFFIXES, ClipFacts, is_clip, probe_clip
from simpletuner.data.media import PICTURE_SUFFIXES, inspect
from simpletuner.data.names import (
    CAPTION_SUFFIXES,
    METADATA_NAMES,
    UNREAD,
    Reason,
    match_captions,
    name_problem,
    pair_key,
    printable,
    suffix_of,
    unread_format,
)
from simpletuner.data.sample import CLIP, PICTURE, Rejected
from simpletuner.errors import Problem, Reading

if TYPE_CHECKING:  # entries imports this module
    from simpletuner.data.entries import DataContext

Reasons = Mapping[str, Reason]  # why files are not used, by name


@dataclass(frozen=True)
class Scan:
    """The files below a folder.

    Attributes:
        files: names of pictures or of clips, sorted; a name is the path below the folder with `/`.
        captions: the caption file of each picture or clip that has one.
        metadata: names of metadata.jsonl and metadata.csv, which may list captions.
        ignored: all other files by name, with the reason.
        table: captions by name, if they come from a table.
        origins: source of a downloaded file, by name.
    """

    files: tuple[str, ...] = ()
    captions: Mapping[str, str] = field(default_factory=dict)
    metadata: tuple[str, ...] = ()
    ignored: Reasons = field(default_factory=dict)
    table: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)


def is_readable(folder: Path) -> bool:
    """Whether a folder exists and can be listed."""
    return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)


def scan(root: Path, wanted: frozenset[str] = PICTURE_SUFFIXES) -> Scan:
    """List a folder and its subfolders, in the same order on every machine.

    Links are followed; every folder is visited once. A folder that cannot be listed is reported as ignored.

    Args:
        wanted: extensions of the files to look for.

    Raises:
        OSError: `root` itself cannot be listed.
    """
    return classify(_walk(root), wanted)


def classify(names: Iterable[tuple[str, Reason | None]], wanted: frozenset[str]) -> Scan:
    """Sort files into pictures or clips, caption files and ignored files.

    Args:
        names: paths below the folder, with the reason if a file cannot be used.
        wanted: extensions of the files to look for.
    """
    media, texts, metadata, foreign = list[str](), list[str](), list[str](), list[str]()
    ignored: dict[str, Reason] = {}
    # Sorted, since listings depend on the file system and the first of several caption files is used.
    for name, problem in sorted(names, key=itemgetter(0)):
        suffix = suffix_of(name)
        if problem is not None:
            # Names with surrogates cannot be printed or written to the plan's JSON.
            ignored[printable(name)] = problem
        elif suffix in wanted:
            media.append(name)
        elif suffix in CAPTION_SUFFIXES:
            texts.append(name)
        elif name.rpartition("/")[2].lower() in METADATA_NAMES:
            metadata.append(name)
        else:
            foreign.append(name)
    if foreign:
        stems = {pair_key(name) for name in media}
        ignored |= {name: _foreign(name, wanted, stems) for name in foreign}
    captions, unread = match_captions(media, texts)
    return Scan(tuple(media), captions, tuple(metadata), {**ignored, **unread})


def _foreign(name: str, wanted: frozenset[str], stems: Set[str]) -> Reason:
    """Why a file that is neither wanted nor a caption is not used.

    Args:
        stems: `pair_key` of the wanted files. A raw file or the clip of a live photo beside its picture is no loss.
    """
    suffix = suffix_of(name)
    wants_clips = not wanted >= PICTURE_SUFFIXES
    kind = "a clip" if wants_clips else "a picture"
    category, detail = f"not {kind}", f"does not have the extension of {kind}"
    if advice := unread_format(name):
        category, detail = UNREAD, advice
    elif wants_clips and suffix == ".webp":
        category, detail = PICTURE, "is a WebP file, and those are pictures; convert an animation to .mp4 or .gif"
    elif wants_clips and suffix in PICTURE_SUFFIXES:
        category, detail = PICTURE, "is a picture; pictures need a separate dataset (dataset_type image)"
    elif not wants_clips and suffix in CLIP_SUFFIXES:
        category, detail = CLIP, "is a clip; clips need a separate dataset (dataset_type video)"
    return (f"not {kind}" if pair_key(name) in stems else category), detail


def _walk(root: Path) -> Iterator[tuple[str, Reason | None]]:
    """Every file below a folder, with the reason if it cannot be used."""
    top, failed = str(root), list[OSError]()
    # By device and inode: links to folders are followed and may form a cycle.
    visited: set[tuple[int, int]] = set()
    for folder, below, names in os.walk(top, followlinks=True, onerror=failed.append):
        prefix, status = "" if folder == top else f"{os.path.relpath(folder, top)}/", Path(folder).stat()
        identity, is_kernel = (status.st_dev, status.st_ino), status.st_dev in _kernel_devices()
        if identity in visited or is_kernel:
            message = "belongs to the kernel (/proc, /sys)" if is_kernel else "is a link to a folder already listed"
            yield prefix or ".", ("unreadable", message)
            below.clear()
            continue
        visited.add(identity)
        unusable = {name for name in below if name_problem(name)}
        yield from ((prefix + name, name_problem(name)) for name in (*names, *unusable))
        # A fixed order determines which of several links leads to a folder.
        below[:] = sorted(set(below) - unusable, reverse=True)
    for error in failed:
        if error.filename == top:
            raise error
        yield f"{os.path.relpath(error.filename, top)}/", ("unreadable", f"cannot be listed: {error.strerror}")


@cache
def _kernel_devices() -> frozenset[int]:
    """Devices of the kernel's virtual file systems, which have hundreds of thousands of files."""
    return frozenset(folder.stat().st_dev for folder in (Path("/proc"), Path("/sys")) if folder.is_mount())


INDEX_NAME = "index.json"
# Increment it when files must be read again.
# 2: clips with HDR or a mirroring matrix are refused. 3: checksums of PNG files; colours of clips. 4: AVIF and HEIC.
# 5: colours of pictures, and clean apertures; HDR pictures are refused; clips are read by PyAV.
INDEX_VERSION = 5
# The first version whose pictures are read with `Sample.conversions`, and whose clips have a reader in their key.
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
        captions: content of the caption file at `stamp`; without a stamp the last captions used, in case the file is
            gone.
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
        return self.width, self.height


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
    names, folder = list(names), str(root)
    parts = (names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE))
    # Threads suffice: reading and hashing release the GIL.
    with ThreadPoolExecutor(max(1, min(workers, os.cpu_count() or 1))) as pool:
        facts = pool.map(lambda part: [_facts_of(f"{folder}/{name}", known.get(name)) for name in part], parts)
        return dict(zip(names, chain.from_iterable(facts), strict=True))


def _facts_of(path: str, known: FileFacts | None) -> FileFacts:
    if known is not None:
        with suppress(OSError):  # `_inspect` reports it
            status = os.stat(path)  # noqa: PTH116 - pathlib takes three times as long
            same = (status.st_size, status.st_mtime_ns) == (known.size, known.mtime_ns)
            # Indexes of earlier versions have problems without a reason.
            if same and stat.S_ISREG(status.st_mode) and (known.reason or not known.problem):
                return known
    return _inspect(Path(path))


def _inspect(path: Path) -> FileFacts:
    clip = is_clip(path)
    facts = FileFacts(0, 0, "")
    try:
        size, mtime_ns = files.check_regular(path, files.LARGEST_CLIP if clip else files.LARGEST_PICTURE)
        # A picture is read once for hash and size. A clip may not fit into memory, so it is hashed in chunks.
        data = b"" if clip else files.read_file(path, files.LARGEST_PICTURE)
        facts = FileFacts(size, mtime_ns, files.content_hash(path) if clip else hashlib.sha256(data).hexdigest())
        if clip:
            shown = probe_clip(path)
            return replace(facts, width=shown.width, height=shown.height, clip=shown)
        picture = inspect(data)
        return replace(facts, width=picture.width, height=picture.height, conversions=picture.conversions)
    except files.MediaError as error:
        # Facts without size, time and content match no file and are not saved, so the next run retries.
        known = FileFacts(0, 0, "") if isinstance(error, files.UnreadableError) else facts
        return replace(known, problem=str(error), reason=error.reason)


def load_index(folder: Path, root: Path) -> dict[str, FileFacts]:
    """Read the index of a latent cache folder; empty if it is missing, damaged or belongs to another dataset folder."""
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
    return int(version[1]) if version else None


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
            content = _INDEX.dump_json(_Index(INDEX_VERSION, str(root.absolute()), part), exclude_defaults=True)
            index.write(content + b"\n")


@dataclass(frozen=True)
class Folder:
    """A dataset folder with all its files inspected.

    Attributes:
        root: the folder.
        facts: facts of every picture or clip, sorted by name.
        listing: caption files, captions of a table, origins.
        gone: names that are trained from the cache although their files are gone.
        rejected: every file that is not used, with the reason.
        indexed: content of the index on disk.
    """

    root: Path
    facts: dict[str, FileFacts]
    listing: Scan = field(default_factory=Scan)
    gone: frozenset[str] = frozenset()
    rejected: tuple[Rejected, ...] = ()
    indexed: Mapping[str, FileFacts] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Whether the folder exists, or an index can stand in for it."""
        return is_readable(self.root) or bool(self.facts)

    @property
    def usable(self) -> list[str]:
        """Names of the pictures or clips without a problem, sorted."""
        return [name for name, fact in self.facts.items() if fact.problem is None]


def read_excluded(config: DatasetConfig) -> Reading[frozenset[str]]:
    """The files named in the entry's `exclude_files`; empty without that list."""
    path = Path(config.instance_data_dir or "", config.exclude_files)
    if path.name != config.exclude_files:
        yield Problem("exclude_files", f"{config.exclude_files!r} must be the name of a file in the dataset's folder.")
        return frozenset()
    if "exclude_files" not in config.model_fields_set and not path.is_file():
        return frozenset()
    names = (yield from named_by("exclude_files", path, read_json(path, list, "a JSON list of file names"))) or []
    if not all(isinstance(name, str) for name in names):
        yield Problem("exclude_files", f'{str(path)!r} must be a JSON list of file names, such as ["a.png"].')
    return frozenset(name for name in names if isinstance(name, str))


def read_folder(config: DatasetConfig, context: DataContext, listing: Scan | None, excluded: frozenset[str]) -> Folder:
    """Inspect every file of an entry; files unchanged since the last run are not read again.

    Args:
        listing: the files of a remote dataset, whose download folder may hold more; None lists the folder.
        excluded: files to leave out.
    """
    root = Path(config.instance_data_dir or "")
    known = load_index(Path(config.cache_dir_vae or ""), root)
    if listing is None:
        listing = scan(root, wanted_suffixes(config, context)) if is_readable(root) else Scan()
    left_out = {**listing.ignored, **_not_chosen(config, listing.files, excluded, known)}
    names = [name for name in listing.files if name not in left_out]
    facts = inspect_files(root, names, known, workers=context.caching.max_workers)
    listed = frozenset(listing.files)
    # Only usable files count: a file with a problem may have been moved to quarantine.
    lost = {name: fact for name, fact in known.items() if name not in listed and fact.problem is None}
    if context.defaults.ignore_missing_files:
        facts |= lost
    else:
        left_out |= dict.fromkeys(lost, ("gone", "was here in the last run and is gone"))
    left_out |= {name: (fact.reason, fact.problem) for name, fact in facts.items() if fact.problem}
    rejected = tuple(Rejected(config.id, name, *why) for name, why in left_out.items())
    # Files with a problem stay in the index too; otherwise every start would read them again.
    return Folder(root, dict(sorted(facts.items())), listing, frozenset(lost.keys() & facts.keys()), rejected, known)


def _not_chosen(config: DatasetConfig, names: Sequence[str], excluded: Set[str], known: Collection[str]) -> Reasons:
    """Files left out by the user, with `exclude_files` or by keeping the list of the last run."""
    reason = "not chosen", f"is left out by {config.exclude_files}"
    left_out = dict.fromkeys(sorted(excluded & {*names}), reason)
    # Without an index, no list exists to keep.
    if known and (config.preserve_data_backend_cache or {"metadata", "aspect"} & {*(config.skip_file_discovery or ())}):
        detail = "was added after the list of files was made, and that list is kept"
        left_out |= {name: ("not chosen", detail) for name in names if name not in known}
    return left_out


def wanted_suffixes(config: DatasetConfig, context: DataContext) -> frozenset[str]:
    """File extensions that an entry uses; the mask of a clip may be a picture."""
    if context.spec.media == "video" and config.conditioning_type in MASKS:
        return PICTURE_SUFFIXES | CLIP_SUFFIXES
    return CLIP_SUFFIXES if context.spec.media == "video" and config.holds_clips else PICTURE_SUFFIXES
