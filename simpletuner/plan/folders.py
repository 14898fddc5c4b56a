"""Folders that a run will write to, which need not be there yet."""

from __future__ import annotations

import os
from pathlib import Path

from simpletuner.errors import Problem


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def why_not_writable(key: str, folder: Path) -> Problem | None:
    """Why a folder that a key names cannot be made or written to; None where it can."""
    parent = existing(folder)
    if not parent.is_dir():
        return Problem(key, f"{str(folder)!r} cannot be a folder: {str(parent)!r} is a file.")
    if not os.access(parent, os.W_OK | os.X_OK):
        return Problem(key, f"{str(folder)!r} cannot be written to (no permission in {str(parent)!r}).")
    return None
