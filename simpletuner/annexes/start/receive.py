"""Files from elsewhere, one by one or in a zip, are put into a folder: each whole or not at all, and none overwritten.

A file is received, and a zip unpacked, in a hidden folder beside its place. Files get their names when all of them are
there, so a connection that breaks or a disk that is full leaves nothing behind.
"""

from __future__ import annotations

import lzma
import os
import re
import shutil
import stat
import struct
import time
import unicodedata
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import BadZipFile, ZipFile, ZipInfo

from simpletuner.atomic import writing_to
from simpletuner.budget.device import gigabytes
from simpletuner.data.clips import CLIP_SUFFIXES
from simpletuner.data.discovery import CAPTION_SUFFIX, inspect_files, name_problem
from simpletuner.data.files import LARGEST_CLIP
from simpletuner.data.media import PICTURE_SUFFIXES
from simpletuner.errors import DiskFullError, UserError

ZIP, HIDDEN = ".zip", ".upload-"
USED = PICTURE_SUFFIXES | CLIP_SUFFIXES | {CAPTION_SUFFIX}
LARGEST_FILE = LARGEST_CLIP  # also of a zip, packed and unpacked
MOST_FILES = 10_000  # of a zip, or dropped at once
DEEPEST = 8  # folders inside each other
# Pictures and clips hardly shrink. What shrinks more is a bomb, unless all of it is small, as flat masks are.
MOST_SHRUNK, SMALL = 100, 2**28
LONGEST_NAME = 200  # bytes; file systems take 255, and temporary files add to a name
# Control characters, overrides of the writing direction, and what Windows refuses in names.
UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff<>:"|?*]')
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)  # devices of Windows
SEPARATORS = re.compile(r"[/\\]")
LONGEST_LIST = MOST_FILES * 1024  # bytes of the list of files in a zip, which is read into memory
END_OF_ZIP, LARGE_ZIP = b"PK\5\6", b"PK\6\7"  # what begins the end of a zip, and the 20 bytes before it in a large one
LARGE_END, LONGEST_END = 56 + 20, 56 + 20 + 22 + 2**16
LEFT_SECONDS = 3600.0  # without a byte, after which an upload belongs to a server that was killed


def receive(folder: Path, name: str, parts: Iterable[bytes]) -> tuple[list[str], dict[str, str]]:
    """Save a file, or the files of a zip, in a folder.

    Args:
        name: a path below the folder, as `safe_name` makes it.
        parts: of its content, as they arrive.

    Returns:
        The names of the saved files, and by name why others were not saved.

    Raises:
        UserError: it is too large, or a damaged or dangerous zip.
        DiskFullError: no space left.
    """
    is_zip, received = name.lower().endswith(ZIP), 0
    if not is_zip and (reason := why_unused(name)):
        return [], {name: reason}
    _sweep(folder)
    with writing_to(folder / name), TemporaryDirectory(prefix=HIDDEN, dir=folder) as hidden:
        # Not flushed to the disk: training detects a file that a power cut has torn.
        file = Path(hidden, f"0{Path(name).suffix.lower()}")
        with file.open("xb") as target:
            for part in parts:
                received += len(part)
                if received > LARGEST_FILE:
                    raise UserError(f"{name} is larger than {gigabytes(LARGEST_FILE)}.")
                target.write(part)
        found, skipped = unpack(file, name) if is_zip else ({name: file}, {})
        return _place(found, folder, skipped)


def _sweep(folder: Path) -> None:
    """Remove what a killed server has left."""
    for left in folder.glob(f"{HIDDEN}*/"):
        with suppress(FileNotFoundError):  # its upload has just ended
            if max(path.stat().st_mtime for path in (left, *left.iterdir())) < time.time() - LEFT_SECONDS:
                shutil.rmtree(left)


def _place(found: Mapping[str, Path], folder: Path, skipped: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Give files their names in a folder, but those that are damaged or whose names are taken."""
    saved = []
    for name, path in found.items():
        facts = inspect_files(path.parent, [path.name], {}) if path.suffix != CAPTION_SUFFIX else {}
        if reason := next((each.problem for each in facts.values()), None):
            skipped[name] = reason
        elif _keep(path, folder, name):
            saved.append(name)
        else:
            skipped[name] = "is there already; the file that was there has been kept"
    return saved, skipped


def _keep(path: Path, folder: Path, name: str) -> bool:
    """Move a file to its name below a folder, unless that is taken."""
    target = folder / name
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        return False  # by a link to elsewhere
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)  # unlike a rename it fails if the name exists
    except (FileExistsError, NotADirectoryError):
        return False
    except OSError:  # a file system without links
        if os.path.lexists(target):
            return False
        path.rename(target)
    return True


def unpack(archive: Path, title: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Unpack a zip beside itself: where its files are, and by name why others were left in it.

    Raises:
        UserError: it is damaged or dangerous.
    """
    try:
        _check_end(archive)
        with ZipFile(archive) as content:
            members = [member for member in content.infolist() if not member.is_dir()]
            _check(members, archive.stat().st_size)
            check_space(archive.parent, sum(member.file_size for member in members))
            found, skipped = _unpack(content, members, archive)
    except _Fault as fault:
        raise UserError(f"{title} was not unpacked: {fault}.") from None
    except (BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError) as error:
        raise UserError(f"{title} is damaged, or not a zip: {error}.") from None
    if len({name.partition("/")[0] for name in found}) == 1 and all("/" in name for name in found):
        # The folder that was zipped.
        found = {name.partition("/")[2]: path for name, path in found.items()}
    return found, skipped


def _unpack(content: ZipFile, members: Sequence[ZipInfo], archive: Path) -> tuple[dict[str, Path], dict[str, str]]:
    found, skipped = dict[str, Path](), dict[str, str]()
    for number, member in enumerate(members, start=1):
        name = safe_name(member.filename)
        if reason := why_unused(name) or (name in found and "is in the zip twice; the first was used"):
            skipped[name] = reason
            continue
        found[name] = archive.with_name(f"{number}{Path(name).suffix.lower()}")
        with content.open(member) as source, found[name].open("xb") as target:
            shutil.copyfileobj(source, target)
    return found, skipped


class _Fault(Exception):
    """Why a zip is not unpacked."""


def _check_end(archive: Path) -> None:
    """Raise for a zip of too many files before all of them are listed in memory, whatever number it claims."""
    with archive.open("rb") as file:
        file.seek(max(0, archive.stat().st_size - LONGEST_END))
        before, found, end = file.read().rpartition(END_OF_ZIP)
    count, size = struct.unpack_from("<6xHL", end.ljust(12)) if found else (0, 0)
    if found and before[-20:-16] == LARGE_ZIP:
        count, size = struct.unpack_from("<32x2Q", before[-LARGE_END:].ljust(LARGE_END))
    if count > MOST_FILES or size > LONGEST_LIST:
        raise _Fault(f"it holds more than {MOST_FILES:,} files")


def _check(members: Sequence[ZipInfo], size: int) -> None:
    """Raise unless a zip of so many bytes may be unpacked."""
    total = sum(member.file_size for member in members)
    if len(members) > MOST_FILES:
        raise _Fault(f"it holds more than {MOST_FILES:,} files")
    if total > LARGEST_FILE:
        raise _Fault(f"its files take {gigabytes(total)}; at most {gigabytes(LARGEST_FILE)} are taken")
    if total > max(SMALL, MOST_SHRUNK * size):
        raise _Fault(f"{gigabytes(size)} would become {gigabytes(total)}, as pictures and clips never do")
    for member in members:
        _check_member(member)


def _check_member(member: ZipInfo) -> None:
    folders = SEPARATORS.split(member.filename)[:-1]
    if stat.S_ISLNK(member.external_attr >> 16):
        raise _Fault(f"{member.filename} is a link")
    if {"..", ""} & {*folders} or re.match(r"[a-zA-Z]:", member.filename):
        raise _Fault(f"{member.filename} leads out of the folder")
    if len(folders) > DEEPEST:
        raise _Fault(f"{member.filename} is in more than {DEEPEST} folders")
    if member.flag_bits & 1:
        raise _Fault("it needs a password")


def why_unused(name: str) -> str | None:
    """Why a file is not taken, by its name."""
    hidden = next(filter(None, map(name_problem, name.split("/"))), None)
    kind = None if Path(name).suffix.lower() in USED else "is not a picture, a clip, a caption (.txt) or a zip"
    return hidden[1] if hidden else kind


def safe_name(name: str) -> str:
    """A path below a folder, of names that every system can store."""
    parts = (safe_part(part) for part in SEPARATORS.split(unicodedata.normalize("NFC", name)))
    return "/".join(part for part in parts if part.strip("."))


def safe_part(part: str) -> str:
    """A name of a file or folder that every system can store; its extension stays."""
    part = UNSAFE.sub("-", part).strip().rstrip(".")
    path = Path(f"_{part}" if RESERVED.match(part) else part)
    return path.stem.encode()[: LONGEST_NAME - len(path.suffix.encode())].decode(errors="ignore") + path.suffix


def check_space(folder: Path, needed: int) -> None:
    """Raise if files do not fit on the disk; a full one would also stop runs from saving.

    Raises:
        DiskFullError: what is needed, and what is free.
    """
    if needed > (free := shutil.disk_usage(folder).free):
        raise DiskFullError(f"{folder}: {gigabytes(needed)} do not fit on the disk, which has {gigabytes(free)} free.")
