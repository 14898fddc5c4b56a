"""Paths that users write, and messages about those that do not exist."""

from __future__ import annotations

import os
from pathlib import Path

from simpletuner.errors import nearest


def why_no_file(path: Path) -> str:
    """Why there is no file at a path, as the end of a sentence."""
    return "is a folder, not a file" if os.path.isdir(path) else "does not exist"  # noqa: PTH112 - never raises


def home_path(text: str) -> Path:
    """A path with `~` expanded if possible; unlike `Path.expanduser`, it never raises."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def missing_path(path: Path) -> str:
    """`'x' does not exist. Did you mean 'y'?`, with the nearest name beside it."""
    return f"{str(path)!r} does not exist.{similar_path(path)}"


def similar_path(path: Path, pattern: str = "*") -> str:
    """` Did you mean 'x'?` with the most similar name beside a path, or an empty string.

    Args:
        pattern: of the names to consider; `*/` means folders.
    """
    names = sorted(sibling.name for sibling in path.parent.glob(pattern) if sibling.exists())
    # Names alone: paths with the same long parent would all be similar.
    guess = nearest(path.name, names)
    return f" Did you mean {str(path.parent / guess)!r}?" if guess else ""
