"""Files that are either the old ones or the new ones, never a half of each."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simpletuner.errors import DiskFullError


@contextmanager
def disk_full_as_user_error(path: Path) -> Iterator[None]:
    """Turn "no space left" into the error that the command line explains without a traceback."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFullError(f"{path}: no space left on the disk; everything complete was kept.") from error


def replace_file(path: Path, content: bytes | str) -> None:
    """Write the content beside the file and rename it into place.

    Raises:
        DiskFullError: there was no space; the old file is untouched.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}-tmp")
    try:
        with disk_full_as_user_error(path), temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
