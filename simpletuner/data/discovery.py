"""Which files a dataset folder holds, and which of them are pictures or clips, and captions."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .clips import CLIP_SUFFIXES
from .media import PICTURE_SUFFIXES
from .sample import Reason

CAPTION_SUFFIX = ".txt"


@dataclass(frozen=True)
class Scan:
    """The files below a folder.

    Attributes:
        files: names of pictures or of clips, sorted; a name is the path below the folder with `/`.
        captions: name of the caption file by the key (`pair_key`) of the files it belongs to.
        ignored: everything else by name, with the reason to count by and the one to read.
    """

    files: tuple[str, ...] = ()
    captions: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, tuple[Reason, str]] = field(default_factory=dict)


def pair_key(name: str) -> str:
    """What a picture or clip has in common with its caption file and its partner: folder and stem.

    Unicode is composed first: some systems store accents and vowel signs as characters of their own.
    """
    return unicodedata.normalize("NFC", str(PurePosixPath(name).with_suffix("")))


def is_readable(folder: Path) -> bool:
    """Whether there is a folder that can be listed."""
    return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)


def scan(root: Path, *, clips: bool = False) -> Scan:
    """List a folder with its sub-folders, in an order that is the same everywhere.

    Links are followed, each folder once. A folder that cannot be listed is reported as ignored.

    Args:
        clips: look for clips instead of pictures.

    Raises:
        OSError: `root` itself cannot be listed.
    """
    files, texts = [], []
    wanted = CLIP_SUFFIXES if clips else PICTURE_SUFFIXES
    ignored: dict[str, tuple[Reason, str]] = {}
    for name, problem in sorted(_walk(root)):
        if problem is not None:
            ignored[_printable(name)] = problem
        elif _suffix(name) in wanted:
            files.append(name)
        elif _suffix(name) == CAPTION_SUFFIX:
            texts.append(name)
        else:
            ignored[name] = _foreign(name, clips)
    captions = _captions(files, texts, ignored)
    return Scan(tuple(files), captions, ignored)


def _foreign(name: str, clips: bool) -> tuple[Reason, str]:
    if not clips:
        return "not a picture", "is not a picture file by its ending"
    if _suffix(name) in PICTURE_SUFFIXES:
        return "not a clip", "is a picture; pictures need a dataset of their own (dataset_type image)"
    return "not a clip", "is not a clip by its ending"


def _captions(files: Sequence[str], texts: Sequence[str], ignored: dict[str, tuple[Reason, str]]) -> dict[str, str]:
    keys = {pair_key(name) for name in files}
    captions: dict[str, str] = {}
    for name in texts:
        key = pair_key(name)
        if key not in keys:
            ignored[name] = ("caption without a file", "has no picture or clip of the same name")
        elif key in captions:
            ignored[name] = ("unused caption", f"says the same name as {captions[key]}, which is used")
        else:
            captions[key] = name
    return captions


def _walk(root: Path) -> Iterator[tuple[str, tuple[Reason, str] | None]]:
    """Every file below a folder with the reason why it cannot be looked at, if there is one."""
    visited: set[tuple[int, int]] = set()
    stack = [(root, "")]
    while stack:
        folder, prefix = stack.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
            identity = (folder.stat().st_dev, folder.stat().st_ino)
        except OSError as error:
            if not prefix:
                raise
            yield prefix, ("unreadable", f"cannot be listed: {error.strerror}")
            continue
        if identity in visited:
            yield prefix, ("unreadable", "is a link to a folder that was listed already")
            continue
        visited.add(identity)
        for entry in entries:
            name = prefix + entry.name
            problem = _name_problem(entry.name)
            if problem is None and Path(entry.path).is_dir():
                stack.append((Path(entry.path), name + "/"))
            else:
                yield name, problem


def _name_problem(name: str) -> tuple[Reason, str] | None:
    if name.startswith("."):
        return "hidden", "is hidden: its name begins with a dot"
    if _printable(name) != name:
        return "unusable name", "has a name that is not UTF-8; rename it"
    return None


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()
