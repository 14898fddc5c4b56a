"""Atomic writes of files and folders, even if the process is killed.

A file is written under a temporary name in the same folder and then renamed; a folder is built
under a name that ends in `-tmp` and then renamed. The previous version stays until the new one is
complete. A full disk raises `DiskFullError` with the path, a read-only folder `WriteError`; no
partial file remains.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO

from simpletuner.errors import DiskFullError, WriteError, causes, reached_limit

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"
UNFINISHED_FOLDER_SUFFIX = "-tmp"
OLD_FOLDER_SUFFIX = f"-old{UNFINISHED_FOLDER_SUFFIX}"
DISK_FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT})
NOT_PERMITTED = frozenset({errno.EACCES, errno.EPERM})
# Not permitted, read-only, or a failing disk or network.
UNWRITABLE_CODES = NOT_PERMITTED | {
    errno.EROFS,
    errno.EIO,
    errno.ENXIO,
    errno.ENODEV,
    errno.ESTALE,
    errno.ENOTCONN,
}
OCCUPIED_CODES = frozenset({errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST})
# Errors of `chmod` on disks without permissions.
NO_PERMISSIONS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# Errors of `flock` on disks without locks, such as some network volumes of rented machines.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# Names created by `open_atomically`; temporary files of other programs are kept.
STRAY_FILE = re.compile(rf"\..+\.[0-9a-f]{{12}}{re.escape(TEMPORARY_SUFFIX)}")
# Native writers (safetensors, torch) report the system's error only as text.
DISK_FULL_WORDS = ("no space left on device", "disk quota exceeded", "not enough space on the disk")

PRIVATE = 0o600  # mode of a file that only its owner can read
PERMISSION_BITS = 0o777  # who can read, write and execute a file; a replacement keeps them


def write_atomically(
    path: Path, content: bytes | str, *, durable: bool = True, private: bool = False
) -> None:
    """Write a whole file, text as UTF-8.

    Args:
        path: the file; its folder is created if missing.
        content: the whole content.
        durable: fsync, to survive a power cut. Not needed for files whose damage is detected and
            repaired on reading.
        private: only the owner can read the file, which may hold secrets.

    Raises:
        DiskFullError: no space or quota left; an existing file is kept.
    """
    with open_atomically(path, durable=durable, private=private) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any, *, durable: bool = True, private: bool = False) -> None:
    """Write indented JSON with `write_atomically`, ending with a newline."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write_atomically(path, text, durable=durable, private=private)


@contextmanager
def open_atomically(
    path: Path, *, durable: bool = True, private: bool = False
) -> Iterator[BinaryIO]:
    """A context with a writable binary file, renamed to `path` unless the block raises.

    The file has the permissions of the one that it replaces.

    Raises:
        DiskFullError: as in `write_atomically`.
    """
    # Random, since several threads or processes may write the same file at once.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}")
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = PRIVATE if private else _mode_of(path)
        # Set when the file is created: a secret must not be readable for a moment.
        opener = None if mode is None else partial(os.open, mode=mode)
        try:
            with open(temporary, "xb", opener=opener) as file:
                if mode is not None:
                    _set_mode(temporary, mode)  # again, since `os.open` subtracts the umask
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if durable:
        _flush(path.parent)  # makes the rename durable


def _set_mode(path: Path, mode: int) -> None:
    """Set permissions, if the disk has any: FAT and some network volumes have fixed ones."""
    try:
        path.chmod(mode)
    except OSError as error:
        if error.errno not in NO_PERMISSIONS:
            raise
        logger.debug("%s: this disk keeps no permissions (%s)", path, error.strerror)


def _mode_of(path: Path) -> int | None:
    """The permissions of a file; None if it does not exist."""
    try:
        return path.stat().st_mode & PERMISSION_BITS
    except OSError:
        return None


def write_fully(file: RawIOBase, content: bytes) -> None:
    """Write everything to an unbuffered file.

    At a limit, such as a full disk, one write may be short without an error; the next one fails
    with the reason.
    """
    rest = memoryview(content)
    while rest:
        written = file.write(rest)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rest = rest[written:]


@contextmanager
def locked_for_change(path: Path) -> Iterator[None]:
    """Lock a file for a read-modify-write in the block.

    The lock is a separate file, `.<name>.lock`, since writing replaces the file itself.

    Raises:
        DiskFullError, WriteError: as in `writing_to`.
    """
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f".{path.name}.lock").open("ab")
    with file:
        take_lock(file)
        yield


def take_lock(file: BinaryIO, *, wait: bool = True) -> bool:
    """Take an exclusive lock on an open file, held until the file is closed.

    Windows and disks without locks have none; the file then counts as locked.

    Args:
        wait: wait for the lock; otherwise return False if another process holds it.
    """
    if sys.platform != "win32":
        import fcntl

        operation = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.flock(file, operation)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _warn_of_no_locks(Path(file.name).parent)
    return True


@cache  # once a folder
def _warn_of_no_locks(folder: Path) -> None:
    logger.warning(
        "%s is on a disk without locks. Start one run at a time with this folder.", folder
    )


@contextmanager
def build_folder(final: Path) -> Iterator[Path]:
    """A context with an empty folder, renamed to `final` unless the block raises.

    Yields:
        the folder `<final>-tmp`. An exception removes it; after a kill it remains until the next
        build of the same folder.

    Raises:
        DiskFullError: no space or quota left; an existing folder is kept.
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
    """Flush a finished folder to the disk and rename it to its final name.

    An existing folder is first moved aside and later deleted, since rename cannot replace a folder
    that is not empty. A kill between the two renames leaves the old folder as `<final>-old-tmp`,
    see `sweep_folders`.
    """
    # Contents first: without a flush, a rename may reach the disk before the data.
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
    """Translate write errors inside the block to errors that name the path.

    Raises:
        DiskFullError: no space left.
        WriteError: no permission, or a read-only or failing disk.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, WriteError):
            raise
        if is_disk_full(error):
            message = (
                f"{path}: no space left on the disk. Complete files are kept; free some space and "
                "start again."
            )
            raise DiskFullError(message) from error
        limit = reached_limit(error)
        if limit:
            message = f"{path}: cannot be written: {limit} Complete files are kept."
            raise WriteError(message) from error
        reason = _why_failed(error, path)
        if reason:
            message = f"{path}: cannot be written ({reason}). Complete files are kept."
            raise WriteError(message) from error
        raise


def nearest_existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def why_no_folder(folder: Path, written: str) -> str:
    """Why a path, as the user has `written` it, cannot be a folder; empty if it can."""
    parent = nearest_existing(folder)
    if parent.is_dir():
        return ""
    return f"{written!r} cannot be a folder: {str(parent)!r} is a file."


def why_not_writable(folder: Path) -> str:
    """Why a folder cannot be created or written to, before anything is written; empty if it can."""
    parent = nearest_existing(folder)
    # X: without it, nothing in the folder can be opened.
    if parent.is_dir() and not os.access(parent, os.W_OK | os.X_OK):
        return f"{str(folder)!r} cannot be written to (no permission in {str(parent)!r})."
    return why_no_folder(folder, str(folder))


def _why_failed(error: BaseException, path: Path) -> str:
    """Why writing a path failed, according to an error or its causes; empty for unrelated errors.

    A source file that cannot be read does not count, even if it is in the same folder.
    """
    for cause in causes(error):
        if not isinstance(cause, OSError):
            continue
        if isinstance(cause, FileNotFoundError) and not path.parent.is_dir():
            return "its folder was moved or deleted"
        if cause.errno in UNWRITABLE_CODES:
            return os.strerror(cause.errno or 0) if _is_about(cause, path) else ""
        if cause.errno in OCCUPIED_CODES and path.is_dir():
            return "a folder is in its place; move it away"
    return ""


def _is_about(error: OSError, path: Path) -> bool:
    """Whether an error is about writing a path, and not about reading another file."""
    if error.filename is None:
        # A failing write has no file name. Lack of permission is found on opening, which has one.
        return error.errno not in NOT_PERMITTED
    return _belongs_to(Path(error.filename), path)


def _belongs_to(name: Path, path: Path) -> bool:
    """Whether a file is at a path, above or below it, or one of its temporary files."""
    if name.is_relative_to(path) or path.is_relative_to(name):
        return True
    return name.parent == path.parent and name.name.startswith((".", path.name))


def is_disk_full(error: BaseException) -> bool:
    """Whether a write failed because the disk or the quota is full.

    torch.save fails a second time when it closes its archive, so the chain of causes is searched
    too.
    """
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in DISK_FULL_CODES:
            return True
        message = str(cause).lower()
        if any(words in message for words in DISK_FULL_WORDS):
            return True
    return False


def sweep_files(folder: Path, *, deep: bool = False, older_than: float = 0.0) -> None:
    """Remove temporary files of killed processes from a folder.

    Args:
        deep: include subfolders.
        older_than: minimum age in seconds; another process may still be writing younger files.
    """
    for parent, _, names in os.walk(folder):
        for name in names:
            if not name.startswith(".") or not STRAY_FILE.fullmatch(name):
                continue
            path = Path(parent, name)
            # In a shared cache, another process may have renamed the file since the listing.
            with suppress(FileNotFoundError):
                if path.stat().st_mtime <= time.time() - older_than:
                    path.unlink()
        if not deep:
            break


def sweep_folders(parent: Path, name: re.Pattern[str]) -> None:
    """Remove unfinished folders with matching names.

    A kill between the two renames of `_replace_folder` left the old folder alone; it is restored.
    """
    for path in parent.glob(f"*{UNFINISHED_FOLDER_SUFFIX}"):
        is_old = path.name.endswith(OLD_FOLDER_SUFFIX)
        suffix = OLD_FOLDER_SUFFIX if is_old else UNFINISHED_FOLDER_SUFFIX
        final = path.with_name(path.name.removesuffix(suffix))
        if not name.fullmatch(final.name) or not path.is_dir():
            continue
        if is_old and not final.exists():
            path.rename(final)
        else:
            shutil.rmtree(path)


def _flush_tree(folder: Path) -> None:
    # Some libraries write files that only the owner can read; apply the mode that the umask allows.
    mode = folder.stat().st_mode & 0o666
    # Folders too, since a new file's name is an entry of its folder.
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.chmod(mode)
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    """fsync a file or a folder, if supported.

    Windows does not support folders; some network file systems return EINVAL.
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


def unused_path(wanted: Path, number: str = "-{}") -> Path:
    """The path, numbered from 2 if it already exists.

    Args:
        number: how the number is added to the file name.
    """
    path = wanted
    counter = 1
    while os.path.lexists(path):
        counter += 1
        path = wanted.with_stem(wanted.stem + number.format(counter))
    return path
