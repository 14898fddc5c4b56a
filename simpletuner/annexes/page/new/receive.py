"""Saves uploaded files and zips in a folder: all or nothing, without overwriting files.

Files are received, and zips unpacked, in a hidden folder inside the target. They are moved into
place when all are complete, so a broken connection or a full disk leaves nothing behind.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import time
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile, ZipInfo

from simpletuner.atomic import writing_to
from simpletuner.budget.device import gigabytes
from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.file_index import inspect_files
from simpletuner.data.file_names import (
    CAPTION_SUFFIXES,
    METADATA_NAMES,
    name_problem,
    suffix_of,
    unread_format,
)
from simpletuner.data.files import LARGEST_CLIP
from simpletuner.data.pictures import PICTURE_SUFFIXES
from simpletuner.errors import DiskFullError, UserError, counted

ZIP = ".zip"
HIDDEN = ".upload-"
MEDIA = PICTURE_SUFFIXES | CLIP_SUFFIXES
USED = MEDIA | {*CAPTION_SUFFIXES, *map(suffix_of, METADATA_NAMES)}
NOT_USED = "is not a picture, a clip, a caption (.txt, .caption) or a zip"
LARGEST_FILE = LARGEST_CLIP  # also for a zip, packed and unpacked
MOST_FILES = 10_000  # in a zip, or dropped at once
# Pictures and clips hardly compress: a higher ratio is a zip bomb, unless the content is small
# (flat masks).
MOST_SHRUNK = 100
SMALL = 2**28
LONGEST_NAME = 200  # bytes; file systems take 255, and temporary files add to a name
# Control characters, bidirectional overrides, and characters that Windows forbids in names.
UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff<>:"|?*]')
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # devices of Windows
SEPARATORS = re.compile(r"[/\\]")
LONGEST_LIST = MOST_FILES * 1024  # bytes of the list of files in a zip, which is read into memory
# An upload without data for this time was abandoned by a killed server.
ABANDONED_SECONDS = 3600.0


def receive(folder: Path, name: str, parts: Iterable[bytes]) -> tuple[list[str], dict[str, str]]:
    """Save a file, or the files of a zip, in a folder.

    Args:
        name: a path below the folder, returned by `safe_name`.
        parts: chunks of the content.

    Returns:
        The names of the saved files, and the reasons why others were skipped, by name.

    Raises:
        UserError: the file is too large, or is a zip that cannot be unpacked.
        DiskFullError: no space left.
    """
    is_zip = name.lower().endswith(ZIP)
    if not is_zip and (reason := why_unused(name)):
        return [], {name: reason}
    _remove_abandoned(folder)
    with writing_to(folder / name), TemporaryDirectory(prefix=HIDDEN, dir=folder) as hidden:
        # Unpacked files are numbered from 1.
        file = Path(hidden, f"0{Path(name).suffix.lower()}")
        _write(file, parts, name)
        files = {name: file}
        skipped: dict[str, str] = {}
        if is_zip:
            files, skipped = unpack(file, name)
        return _place(files, folder, skipped)


def _write(file: Path, parts: Iterable[bytes], name: str) -> None:
    """Write chunks to a new file; `name` is for the error of a file that is too large."""
    received = 0
    # Not fsynced: training detects files damaged by a power cut.
    with file.open("xb") as target:
        for part in parts:
            received += len(part)
            if received > LARGEST_FILE:
                raise UserError(f"{name} is larger than {gigabytes(LARGEST_FILE)}.")
            target.write(part)


def _remove_abandoned(folder: Path) -> None:
    """Remove unfinished uploads of a killed server."""
    oldest = time.time() - ABANDONED_SECONDS
    for unfinished in folder.glob(f"{HIDDEN}*/"):
        with suppress(FileNotFoundError):  # the upload has just ended
            paths = (unfinished, *unfinished.iterdir())
            if max(path.stat().st_mtime for path in paths) < oldest:
                shutil.rmtree(unfinished)


def _place(
    files: Mapping[str, Path], folder: Path, skipped: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Move files into a folder, except damaged files and names that are taken."""
    saved = []
    for name, path in files.items():
        if reason := _damage(path):
            skipped[name] = reason
        elif _move(path, folder, name):
            saved.append(name)
        else:
            skipped[name] = "exists already; the existing file was kept"
    return saved, skipped


def _damage(path: Path) -> str | None:
    """Why a picture or clip cannot be used; None if it can be, and for other files."""
    if path.suffix not in MEDIA:
        return None
    for fact in inspect_files(path.parent, [path.name], {}).values():
        return fact.problem
    return None


def _move(path: Path, folder: Path, name: str) -> bool:
    """Move a file below a folder; False if the name is taken or leads out of the folder."""
    target = folder / name
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        return False  # through a link
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)  # unlike rename, it fails if the name exists
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError:  # a file system without links
        if os.path.lexists(target):
            return False
        path.rename(target)
    return True


class Archive(FileIO):
    """A zip file with a list of files of limited size.

    `ZipFile` reads this list at once, so a forged one could fill the memory.
    """

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most `size` bytes.

        Raises:
            BadZipFile: the size is larger than a list may be.
        """
        if size and size > LONGEST_LIST:
            allowed = f"at most {gigabytes(LONGEST_LIST)} are allowed"
            raise BadZipFile(f"its list of files takes {gigabytes(size)}; {allowed}")
        return super().read(size)


def unpack(archive: Path, title: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Unpack a zip into its own folder.

    Returns:
        The unpacked files by name, and the reasons why others were skipped, by name.

    Raises:
        UserError: the zip is too large, damaged, or needs a password.
    """
    try:
        with Archive(archive) as file, ZipFile(file) as content:
            members = [member for member in content.infolist() if not member.is_dir()]
            total = sum(member.file_size for member in members)
            most = min(LARGEST_FILE, max(SMALL, MOST_SHRUNK * archive.stat().st_size))
            if len(members) > MOST_FILES or total > most:
                allowed = f"at most {MOST_FILES:,} files and {gigabytes(most)} are allowed"
                raise UserError(
                    f"{title} holds {counted(len(members), 'file')}, {gigabytes(total)}; {allowed}."
                )
            check_space(archive.parent, total)
            files, skipped = _unpack(content, members, archive)
    # RuntimeError: an unknown method, or a password.
    except (BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError) as error:
        raise UserError(f"{title} cannot be unpacked: {error}.") from None
    top_names = {name.partition("/")[0] for name in files}
    if len(top_names) == 1 and all("/" in name for name in files):
        # A folder was zipped: drop its name.
        files = {name.partition("/")[2]: path for name, path in files.items()}
    return files, skipped


def _unpack(
    content: ZipFile, members: Sequence[ZipInfo], archive: Path
) -> tuple[dict[str, Path], dict[str, str]]:
    """Unpack members into numbered files beside the zip.

    A link becomes a file, and no name can lead out of the folder.
    """
    files: dict[str, Path] = {}
    skipped: dict[str, str] = {}
    for number, member in enumerate(members, start=1):
        name = safe_name(member.filename)
        reason = why_unused(name)
        if not reason and name in files:
            reason = "is in the zip twice; the first was used"
        if reason:
            skipped[name] = reason
            continue
        files[name] = archive.with_name(f"{number}{Path(name).suffix.lower()}")
        with content.open(member) as source, files[name].open("xb") as target:
            shutil.copyfileobj(source, target)
    return files, skipped


def why_unused(name: str) -> str | None:
    """Why a file with this name is skipped; None if it is accepted."""
    parts = name.split("/")
    for part in parts:
        problem = name_problem(part)
        if problem is not None:
            _, detail = problem
            return detail
    file = parts[-1]
    if suffix_of(file) in (*MEDIA, *CAPTION_SUFFIXES) or file.lower() in METADATA_NAMES:
        return None
    return unread_format(file) or NOT_USED


def safe_name(name: str) -> str:
    """A relative path whose names are valid on every system."""
    # macOS decomposes letters with accents, which would be other names than composed ones.
    composed = unicodedata.normalize("NFC", name)
    parts = (safe_part(part) for part in SEPARATORS.split(composed))
    return "/".join(part for part in parts if part.strip("."))


def safe_part(part: str) -> str:
    """A file or folder name that is valid on every system, with the same extension."""
    part = UNSAFE.sub("-", part).strip().rstrip(".")
    if RESERVED.match(part):
        part = f"_{part}"
    path = Path(part)
    longest_stem = LONGEST_NAME - len(path.suffix.encode())
    # Ignores a character that is cut in two.
    stem = path.stem.encode()[:longest_stem].decode(errors="ignore")
    return stem + path.suffix


def check_space(folder: Path, needed: int) -> None:
    """Check that files fit on the disk; a full one would also stop runs from saving.

    Args:
        needed: bytes.

    Raises:
        DiskFullError: the disk has too little space.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DiskFullError(
            f"{folder}: {gigabytes(needed)} do not fit on the disk, which has "
            f"{gigabytes(free)} free."
        )
