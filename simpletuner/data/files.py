"""Reads the user's files: regular files of plausible size only, with retries after device errors.

A disk or network error does not mean that the file is damaged: after the retries the run ends and
marks no file.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from simpletuner.config.json_reader import why_not_a_name, why_unreadable
from simpletuner.errors import UserError, is_out_of_memory
from simpletuner.hashing import hash_file

# Limits in bytes that catch sparse files and mistakes, far above the size of any training file.
LARGEST_CAPTION = 1 << 20
LARGEST_PICTURE = 1 << 30
LARGEST_CLIP = 1 << 36

# Errors of the file itself: missing, not permitted, a bad name.
FILE_ERRORS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}
# This process or machine ran out of a resource: neither the file nor the device is at fault.
EXHAUSTED = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EINTR})
# Part of an error of Python without an `errno`.
NO_THREAD = "can't start new thread"
# Modules of this program, whose errors pass `unknown_errors_as_unsuitable`.
PROGRAM = f"{__name__.partition('.')[0]}."
# Pauses in seconds before each further attempt.
RETRY_DELAYS = (0.05, 0.5)

T = TypeVar("T")


class LeftOutError(Exception):
    """A file is left out: the category of the reason, and a text that continues the file's name."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class MediaError(Exception):
    """A file cannot be used; the text gives the cause and continues the file's name.

    `reason` is as in `Rejected`.
    """

    reason = "damaged"


class UnreadableError(MediaError):
    """A file could not be read; its content is unknown."""

    reason = "unreadable"


class UnsuitableError(MediaError):
    """An intact file without trainable content, or one that would be decoded wrongly."""

    reason = "unsuitable"


class DeviceError(UserError):
    """The disk or network that holds a file fails."""


@contextmanager
def unknown_errors_as_unsuitable() -> Iterator[None]:
    """Turn an error that no decoder is known to raise into a reason to leave out this file alone.

    Such a file may be intact, so it is unsuitable and not damaged. Errors of this program have a
    meaning of their own, and errors of the machine are not the file's fault; both pass.

    Raises:
        UnsuitableError: the file cannot be decoded.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(PROGRAM) or is_of_machine(error):
            raise
        raise UnsuitableError(f"cannot be decoded: {describe(error)}") from error


def with_known_errors(frames: Iterator[T]) -> Iterator[T]:
    """The frames of one file, decoded inside `unknown_errors_as_unsuitable`."""
    with unknown_errors_as_unsuitable():
        yield from frames


def is_of_machine(error: Exception) -> bool:
    """Whether an error is about this machine, such as a full disk, and not about a file."""
    has_errno = isinstance(error, OSError) and error.errno is not None
    return has_errno or is_out_of_memory(error) or NO_THREAD in str(error)


def describe(error: Exception) -> str:
    """The first line of an error's message, or its type if there is none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def read_file(path: Path, most: int) -> bytes:
    """Read a whole file.

    Args:
        most: size limit in bytes.

    Raises:
        UnreadableError: not a regular file, too large, missing, or not readable by this user.
        DeviceError: the disk or network failed on every attempt.
    """
    check_regular(path, most)
    return with_retries(path, path.read_bytes)


def content_hash(path: Path) -> str:
    """SHA-256 of a file of the user, read in chunks.

    Raises:
        UnreadableError, DeviceError: as in `read_file`.
    """
    return with_retries(path, lambda: hash_file(path))


def check_regular(path: Path, most: int) -> tuple[int, int]:
    """Check that a file is safe to open; opening a pipe would block.

    Returns:
        size in bytes, modification time in ns.

    Raises:
        UnreadableError, DeviceError: as in `read_file`.
    """
    status = with_retries(path, path.stat)
    fault = why_unreadable(status, most)
    if fault:
        raise UnreadableError(fault)
    return status.st_size, status.st_mtime_ns


def with_retries(path: Path, attempt: Callable[[], T]) -> T:
    """Call `attempt`, which reads `path`, and retry after device errors.

    Raises:
        UnreadableError, DeviceError: as in `read_file`.
        OSError: a resource of this machine is exhausted.
    """
    for pause in (*RETRY_DELAYS, None):
        try:
            return attempt()
        except ValueError as error:
            raise UnreadableError(f"cannot be read: {why_not_a_name(error)}") from error
        except OSError as error:
            if error.errno in FILE_ERRORS:
                raise UnreadableError(f"cannot be read: {error.strerror}") from error
            if error.errno in EXHAUSTED:
                raise
            if pause is None:
                raise DeviceError(_device_message(path, error)) from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def _device_message(path: Path, error: OSError) -> str:
    attempts = len(RETRY_DELAYS) + 1
    return (
        f"{path}: {error.strerror or error}; {attempts} times, the disk or network at "
        f"{_mount_of(path)} failed. The file may be intact: no file is marked as damaged. Start "
        "again when it can be read."
    )


def _mount_of(path: Path) -> Path:
    """The folder at which the file system of a file is mounted."""
    folder = path.absolute().parent
    while not folder.is_mount() and folder != folder.parent:
        folder = folder.parent
    return folder
