"""Archived runs: the output folder is moved to `archive/` beside it, and can be moved back.

Only an archived run can be deleted, and of its folder only what simpletuner wrote.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from simpletuner.annexes.page.runs.contents import ARCHIVED_FILE, Contents
from simpletuner.atomic import unused_path, write_atomically, writing_to
from simpletuner.config.json_reader import read_json
from simpletuner.errors import Problems, UserError, counted, shorten
from simpletuner.planning.lock import LOCK_FILE, in_use, is_at, read_owner, take

ARCHIVE = "archive"
# Errors of a rename: to another disk, and of a folder that is a disk of its own.
OTHER_DISK = (errno.EXDEV, errno.EBUSY)


def is_archived(folder: Path) -> bool:
    """Whether an output folder is one that was archived."""
    return folder.parent.name == ARCHIVE and (folder / ARCHIVED_FILE).is_file()


def home_of(folder: Path) -> Path:
    """Where an archived run was."""
    note = read_json(folder / ARCHIVED_FILE, Problems(), dict) or {}
    name = str(note.get("name", ""))
    # Only a name: a damaged note must not lead elsewhere.
    is_name = name not in ("", ".", "..") and Path(name).name == name
    return folder.parent.parent / (name if is_name else folder.name)


def archive(folder: Path) -> Path:
    """Move an output folder to the archive beside it; returns its new path.

    Raises:
        UserError: a process uses the folder, or it cannot be moved; then nothing has changed.
    """
    note = folder / ARCHIVED_FILE
    target = unused_path(folder.parent / ARCHIVE / folder.name)
    with held(folder, target):
        # In ASCII, which can write a name of bytes that are not UTF-8.
        write_atomically(note, json.dumps({"name": folder.name, "time": round(time.time())}))
        try:
            _move(folder, target)
        except BaseException:
            note.unlink(missing_ok=True)
            raise
    return target


def bring_back(folder: Path) -> Path:
    """Move an archived run to where it was; returns that path.

    Raises:
        UserError: another folder is there, a process uses this one, or it cannot be moved.
    """
    home = home_of(folder)
    if os.path.lexists(home):
        raise UserError(
            f"{home} exists again. Archive or rename it first, then bring {folder.name} back."
        )
    with held(folder, home):
        _move(folder, home)
    (home / ARCHIVED_FILE).unlink(missing_ok=True)
    _remove_if_empty(folder.parent)
    return home


def delete(folder: Path, digest: str) -> Contents:
    """Delete an archived run; returns what it held.

    Args:
        digest: of the contents that the user has confirmed.

    Raises:
        UserError: the folder has other files than confirmed, or files of the user, or it cannot be
            changed; then nothing has been deleted. Or a file appeared meanwhile, which is kept.
    """
    with held(folder, folder):
        contents = Contents.of(folder)
        check_deletable(contents)
        if contents.digest != digest:
            raise UserError(f"{folder} has changed since its files were listed; look again.")
        _unlink(contents)
    _remove_if_empty(folder.parent)
    return contents


def check_deletable(contents: Contents) -> None:
    """Check that a folder holds nothing but simpletuner's files, and that they can be deleted.

    Raises:
        UserError: it does, or they cannot.
    """
    if contents.foreign:
        raise UserError(
            f"{contents.folder} holds {counted(len(contents.foreign), 'file')} that simpletuner "
            f"did not write: {shorten(contents.foreign)}. Move them elsewhere first."
        )
    for folder in (contents.folder, *(contents.folder / name for name in contents.folders)):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise UserError(f"{folder} is read-only, so its files cannot be deleted.")


def _unlink(contents: Contents) -> None:
    """Delete the listed files, then the folders, which must be empty by then."""
    folder = contents.folder
    last = (ARCHIVED_FILE, LOCK_FILE)  # until then, the folder is an archived run
    names = [name for name in contents.files if name not in last]
    with writing_to(folder):
        for name in names:
            (folder / name).unlink(missing_ok=True)
        for name in contents.folders:
            _remove_if_empty(folder / name)
    left = Contents.of(folder)
    added = [name for name in (*left.files, *left.foreign) if name not in last]
    if added or left.folders:
        raise UserError(
            f"{shorten(added or left.folders)} appeared in {folder} meanwhile, and is kept; "
            "everything else is deleted."
        )
    with writing_to(folder):
        for name in last:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()


@contextmanager
def held(folder: Path, target: Path) -> Iterator[None]:
    """Keep runs out of a folder while it is moved to `target`, or deleted.

    Raises:
        UserError: a process uses it.
    """
    path = folder / LOCK_FILE
    had_lock = path.exists()  # of a run that was killed; its state is read from it
    with writing_to(path):
        lock = take(path)
    if lock is None:
        raise in_use(path, read_owner(path), "Stop that run, or wait for its end.")
    with lock:
        try:
            yield
        finally:
            for place in (path, target / LOCK_FILE):
                if not had_lock and is_at(place, lock):
                    place.unlink()


def _move(folder: Path, target: Path) -> None:
    """Rename a folder; nothing exists at the target."""
    with writing_to(target):
        try:
            target.parent.mkdir(exist_ok=True)
            folder.rename(target)
        except OSError as error:
            if error.errno in OTHER_DISK:
                raise UserError(
                    f"{folder} and {target.parent} are on different disks, so the folder cannot "
                    "be moved in one step; move it in a terminal."
                ) from None
            raise


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
