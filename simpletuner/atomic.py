"""Files and folders that appear whole or not at all, whatever kills the process.

A file is written under a temporary name in the same folder and then renamed; a folder is built under a name that ends
in `-tmp` and then renamed. The previous version stays until the new one is complete. A full disk is reported as
`DiskFullError` with the path, a read-only folder as `WriteError`; no partial file is left behind.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

from simpletuner.errors import DiskFullError, WriteError

TEMPORARY_SUFFIX = ".tmp"
UNFINISHED_FOLDER_SUFFIX = "-tmp"
OLD_FOLDER_SUFFIX = f"-old{UNFINISHED_FOLDER_SUFFIX}"
DISK_FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT})
NOT_PERMITTED = frozenset({errno.EACCES, errno.EPERM})
# Not permitted, read-only, or a failing disk or network.
UNWRITABLE_CODES = NOT_PERMITTED | {errno.EROFS, errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ENOTCONN}
# The names that `open_atomically` makes; temporary files of other programs stay.
STRAY_FILE = re.compile(rf"\..+\.[0-9a-f]{{12}}{re.escape(TEMPORARY_SUFFIX)}")
# Writers in native code (safetensors, torch) report the system's error code only as text.
DISK_FULL_WORDS = ("no space left on device", "disk quota exceeded", "not enough space on the disk")


def write_atomically(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a whole file, text as UTF-8.

    Args:
        path: the file; its folder is created when missing.
        content: the whole content.
        durable: also survive a power cut right after. Costs an fsync, so leave it out for files whose damage is
            detected and repaired on reading.

    Raises:
        DiskFullError: no space or quota left; the file that was there is kept.
    """
    with open_atomically(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write a JSON file as `write_atomically` does, indented and ending in a newline."""
    write_atomically(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=durable)


@contextmanager
def open_atomically(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A binary file to write to; it gets its name when the block ends without an exception.

    Raises:
        DiskFullError: as in `write_atomically`.
    """
    # A random part, since several threads or processes may write the same file at once.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}")
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if durable:
        _flush(path.parent)  # the rename itself is an entry of the folder


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """Lock a file that the block reads, changes and writes, against other processes that do the same.

    The lock is a file beside it, `.<name>.lock`, since writing replaces the file itself.

    Raises:
        DiskFullError, WriteError: as in `writing_to`.
    """
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f".{path.name}.lock").open("ab")
    with file:
        hold(file)
        yield


def hold(file: BinaryIO, *, wait: bool = True) -> bool:
    """Take an exclusive lock on an open file, held until it is closed; does nothing on Windows.

    Args:
        wait: for whoever has it; otherwise the answer is False.
    """
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True


@contextmanager
def build_folder(final: Path) -> Iterator[Path]:
    """An empty folder to fill; it gets its name when the block ends without an exception.

    Yields:
        the folder `<final>-tmp`. After an exception it is removed; after a kill it stays, and the next build of the
        same folder removes it.

    Raises:
        DiskFullError: no space or quota left; the folder that was there is kept.
    """
    temporary = final.with_name(final.name + UNFINISHED_FOLDER_SUFFIX)
    with writing_to(final):
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            _replace_folder(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def _replace_folder(temporary: Path, final: Path) -> None:
    """Rename a finished folder to its final name, after flushing everything in it to the disk.

    An existing folder of that name is moved aside first and deleted afterwards: rename cannot replace a folder that is
    not empty. A kill exactly between the two renames leaves the old one as `<final>-old-tmp`, see `sweep_folders`.
    """
    # Contents before the name: after a power cut, a rename may have reached the disk before the data.
    _flush_tree(temporary)
    aside = final.with_name(final.name + OLD_FOLDER_SUFFIX)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    shutil.rmtree(aside, ignore_errors=True)
    _flush(final.parent)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Turn a full or failing disk or a missing permission inside the block into an error that names the path.

    Raises:
        DiskFullError: no space left.
        WriteError: no permission, or a disk that is read-only or fails.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, WriteError):
            raise
        if is_disk_full(error):
            message = f"{path}: no space left on the disk. Complete files are kept; free some space and start again."
            raise DiskFullError(message) from error
        if cause := why_unwritable(error, path.parent):
            raise WriteError(f"{path}: cannot be written ({cause}). Complete files are kept.") from error
        raise


def why_unwritable(error: BaseException, folder: Path) -> str:
    """Why a folder cannot be written to, by an error or what it came from; empty if that is about something else.

    A source file that cannot be read does not count.
    """
    for each in causes(error):
        if isinstance(each, FileNotFoundError) and not folder.is_dir():
            return "its folder was moved or deleted"
        if isinstance(each, OSError) and each.errno in UNWRITABLE_CODES:
            is_ours = each.errno not in NOT_PERMITTED  # the others name no file if writing itself fails
            if each.filename is not None:
                is_ours = Path(each.filename).is_relative_to(folder) or folder.is_relative_to(each.filename)
            return os.strerror(each.errno or 0) if is_ours else ""
    return ""


def is_disk_full(error: BaseException) -> bool:
    """Whether a writer failed because the disk or the quota is full.

    torch.save fails a second time while closing its archive, so the chain of earlier errors is searched too.
    """
    return any(
        (isinstance(each, OSError) and each.errno in DISK_FULL_CODES)
        or any(words in str(each).lower() for words in DISK_FULL_WORDS)
        for each in causes(error)
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from; what `from None` hides was about something else."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def sweep_files(folder: Path, *, deep: bool = False, older_than: float = 0.0) -> None:
    """Remove the unfinished files that a killed process left in a folder.

    Args:
        deep: in its sub-folders, too.
        older_than: seconds; another process may still be writing younger files.
    """
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, each) for each in names if each[0] == "." and STRAY_FILE.fullmatch(each)):
            # In a shared cache, its writer may have renamed it since the folder was listed.
            with suppress(FileNotFoundError):
                if path.stat().st_mtime <= time.time() - older_than:
                    path.unlink()
        if not deep:
            break


def sweep_folders(parent: Path, name: re.Pattern[str]) -> None:
    """Remove unfinished folders whose names match, and restore one that a kill left between two renames."""
    for path in parent.glob(f"*{UNFINISHED_FOLDER_SUFFIX}"):
        old = path.name.endswith(OLD_FOLDER_SUFFIX)
        final = path.with_name(path.name.removesuffix(OLD_FOLDER_SUFFIX if old else UNFINISHED_FOLDER_SUFFIX))
        if name.fullmatch(final.name) and path.is_dir():
            if old and not final.exists():
                path.rename(final)
            else:
                shutil.rmtree(path)


def _flush_tree(folder: Path) -> None:
    # Some libraries write files that only their owner can read; give all of them the mode that the umask allows.
    mode = folder.stat().st_mode & 0o666
    # Folders as well: a new file's name is an entry of its folder, which is flushed on its own.
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(mode)
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    """fsync a file or the entries of a folder, if supported.

    Windows cannot do it for folders; some network file systems return EINVAL.
    """
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def free_path(wanted: Path, number: str = "-{}") -> Path:
    """The path itself, or with a number if a file, folder or link has taken it."""
    numbered = (wanted.with_stem(wanted.stem + number.format(each)) for each in count(2))
    return next(path for path in chain([wanted], numbered) if not os.path.lexists(path))
