"""Lists a dataset folder: pictures or clips, caption files, and why other files are unused."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.config.json_reader import read_json, reported_under
from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.file_index import FileFacts, inspect_files, load_index
from simpletuner.data.file_names import (
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
from simpletuner.data.pictures import PICTURE_SUFFIXES
from simpletuner.data.sample import CLIP, PICTURE, Rejected
from simpletuner.errors import Problems

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

    Links are followed; every folder is visited once. A folder that cannot be listed is reported as
    ignored.

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
    media: list[str] = []
    texts: list[str] = []
    metadata: list[str] = []
    unknown: list[str] = []
    ignored: dict[str, Reason] = {}
    # Listings depend on the file system, and the first of several caption files is used.
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
            unknown.append(name)
    if unknown:
        stems = {pair_key(name) for name in media}
        ignored |= {name: _why_unused(name, wanted, stems) for name in unknown}
    captions, unread = match_captions(media, texts)
    return Scan(
        files=tuple(media),
        captions=captions,
        metadata=tuple(metadata),
        ignored={**ignored, **unread},
    )


def _why_unused(name: str, wanted: frozenset[str], stems: Set[str]) -> Reason:
    """Why a file that is neither wanted nor a caption is not used.

    Args:
        stems: `pair_key` of the wanted files.
    """
    wants_clips = not wanted >= PICTURE_SUFFIXES
    kind = "a clip" if wants_clips else "a picture"
    reason = _media_reason(name, wants_clips=wants_clips)
    if reason is None:
        return f"not {kind}", f"does not have the extension of {kind}"
    category, detail = reason
    # A raw file, or the clip of a live photo, is no loss beside its picture.
    if pair_key(name) in stems:
        category = f"not {kind}"
    return category, detail


def _media_reason(name: str, *, wants_clips: bool) -> Reason | None:
    """Why a picture or clip is not used; None for any other file."""
    suffix = suffix_of(name)
    advice = unread_format(name)
    if advice is not None:
        return UNREAD, advice
    if wants_clips and suffix == ".webp":
        detail = "is a WebP file, and those are pictures; convert an animation to .mp4 or .gif"
        return PICTURE, detail
    if wants_clips and suffix in PICTURE_SUFFIXES:
        return PICTURE, "is a picture; pictures need a separate dataset (dataset_type image)"
    if not wants_clips and suffix in CLIP_SUFFIXES:
        return CLIP, "is a clip; clips need a separate dataset (dataset_type video)"
    return None


def _walk(root: Path) -> Iterator[tuple[str, Reason | None]]:
    """Every file below a folder, with the reason if it cannot be used.

    Raises:
        OSError: `root` itself cannot be listed.
    """
    top = str(root)
    failed: list[OSError] = []
    visited: set[tuple[int, int]] = set()
    for folder, subfolders, names in os.walk(top, followlinks=True, onerror=failed.append):
        prefix = "" if folder == top else f"{os.path.relpath(folder, top)}/"
        reason = _why_not_listed(folder, visited)
        if reason is not None:
            yield prefix or ".", ("unreadable", reason)
            subfolders.clear()
            continue
        unusable = {name for name in subfolders if name_problem(name)}
        for name in (*names, *unusable):
            yield prefix + name, name_problem(name)
        # A fixed order determines which of several links leads to a folder.
        subfolders[:] = sorted(set(subfolders) - unusable, reverse=True)
    for error in failed:
        if error.filename == top:
            raise error
        folder = f"{os.path.relpath(error.filename, top)}/"
        yield folder, ("unreadable", f"cannot be listed: {error.strerror}")


def _why_not_listed(folder: str, visited: set[tuple[int, int]]) -> str | None:
    """Why a folder is skipped, or None.

    Args:
        visited: folders by device and inode, extended by this one: links to folders are followed
            and may form a cycle.
    """
    try:
        status = Path(folder).stat()
    except OSError as error:  # it was removed while the folder above was listed
        return f"cannot be listed: {error.strerror}"
    if status.st_dev in _kernel_devices():
        return "belongs to the kernel (/proc, /sys)"
    identity = (status.st_dev, status.st_ino)
    if identity in visited:
        return "is a link to a folder already listed"
    visited.add(identity)
    return None


@cache
def _kernel_devices() -> frozenset[int]:
    """Devices of the kernel's virtual file systems, which have hundreds of thousands of files."""
    return frozenset(
        folder.stat().st_dev for folder in (Path("/proc"), Path("/sys")) if folder.is_mount()
    )


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


def read_excluded(config: DatasetConfig, report: Problems) -> frozenset[str]:
    """The files named in the entry's `exclude_files`; empty without that list."""
    path = Path(config.instance_data_dir or "", config.exclude_files)
    if path.name != config.exclude_files:
        message = f"{config.exclude_files!r} must be the name of a file in the dataset's folder."
        report.error("exclude_files", message)
        return frozenset()
    if "exclude_files" not in config.model_fields_set and not path.is_file():
        return frozenset()
    with reported_under("exclude_files", path, report) as file_report:
        names = read_json(path, file_report, list, "a JSON list of file names") or []
    if not all(isinstance(name, str) for name in names):
        message = f'{str(path)!r} must be a JSON list of file names, such as ["a.png"].'
        report.error("exclude_files", message)
    return frozenset(name for name in names if isinstance(name, str))


def read_folder(
    config: DatasetConfig, context: DataContext, listing: Scan | None, excluded: frozenset[str]
) -> Folder:
    """Inspect every file of an entry; files unchanged since the last run are not read again.

    Args:
        listing: the files of a remote dataset, whose download folder may hold more; None lists the
            folder.
        excluded: files to leave out.
    """
    root = Path(config.instance_data_dir or "")
    known = load_index(Path(config.cache_dir_vae or ""), root)
    if listing is None:
        listing = Scan()
        if is_readable(root):
            listing = scan(root, accepted_suffixes(config, context))
    left_out = {**listing.ignored, **_not_chosen(config, listing.files, excluded, known)}
    names = [name for name in listing.files if name not in left_out]
    facts = inspect_files(root, names, known, workers=context.caching.max_workers)
    listed = frozenset(listing.files)
    # Only usable files count: a file with a problem may have been moved to quarantine.
    lost = {
        name: fact for name, fact in known.items() if name not in listed and fact.problem is None
    }
    if context.defaults.ignore_missing_files:
        facts |= lost
    else:
        left_out |= dict.fromkeys(lost, ("gone", "was here in the last run and is gone"))
    for name, fact in facts.items():
        if fact.problem:
            left_out[name] = (fact.reason, fact.problem)
    rejected = tuple(Rejected(config.id, name, *reason) for name, reason in left_out.items())
    # Files with a problem stay in the index too; otherwise every start would read them again.
    return Folder(
        root=root,
        facts=dict(sorted(facts.items())),
        listing=listing,
        gone=frozenset(lost.keys() & facts.keys()),
        rejected=rejected,
        indexed=known,
    )


def _not_chosen(
    config: DatasetConfig, names: Sequence[str], excluded: Set[str], known: Collection[str]
) -> Reasons:
    """Files left out by the user, with `exclude_files` or by keeping the list of the last run."""
    detail = f"is left out by {config.exclude_files}"
    left_out = dict.fromkeys(sorted(excluded & {*names}), ("not chosen", detail))
    skipped = config.skip_file_discovery or ()
    keeps_list = config.preserve_data_backend_cache or "metadata" in skipped or "aspect" in skipped
    # Without an index, no list exists to keep.
    if known and keeps_list:
        detail = "was added after the list of files was made, and that list is kept"
        added = [name for name in names if name not in known]
        left_out |= dict.fromkeys(added, ("not chosen", detail))
    return left_out


def accepted_suffixes(config: DatasetConfig, context: DataContext) -> frozenset[str]:
    """File extensions that an entry uses; the mask of a clip may be a picture."""
    if context.spec.media != "video":
        return PICTURE_SUFFIXES
    if config.conditioning_type in MASKS:
        return PICTURE_SUFFIXES | CLIP_SUFFIXES
    if config.holds_clips:
        return CLIP_SUFFIXES
    return PICTURE_SUFFIXES
