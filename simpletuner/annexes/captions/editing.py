"""Change captions and leave files out: what the page of the server does to a dataset's folder. Free of torch.

No file of the user is deleted or moved. A caption is replaced only by somebody who has seen what it says now. Before
many are replaced at once, a hidden file beside them keeps the old ones; of such backups the newest stay.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from simpletuner.annexes.captions.wording import Wording
from simpletuner.atomic import free_path, write_atomically, write_json
from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.values import read_json
from simpletuner.data.captions import control_token, read_caption_text
from simpletuner.data.discovery import read_excluded
from simpletuner.data.files import LARGEST_CAPTION, LeftOutError
from simpletuner.errors import Problems, Reading, UserError, required

BACKUP = re.compile(r"\.captions-[\d-]+\.json")
MOST_BACKUPS = 3  # of a folder: each is listed among the files that are not used
UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # a NUL is refused by whoever reads it, half a character cannot be stored
# Between the comparison of a file with what was seen and its replacement, no other request may replace it.
_writing = threading.Lock()

Edit = Callable[[str, str], str]  # name and text of a caption file in, new text out


class ChangedMeanwhileError(UserError):
    """A file does not say what was seen of it."""


@dataclass(frozen=True)
class CaptionChange:
    """What becomes of a caption file; `name` is its path below the dataset's folder."""

    name: str
    path: Path
    before: str
    after: str


def read_caption(path: Path) -> str | None:
    """The text of a caption file; None if there is none.

    Raises:
        LeftOutError: it cannot be read.
    """
    return read_caption_text(path) if path.is_file() else None


def tag_of(text: str | None) -> str:
    """Identifies what a caption file says; empty if there is none."""
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()[:32]


def write_caption(path: Path, text: str, seen: str) -> None:
    """Replace the text of a caption file.

    Args:
        seen: the tag of what it said when it was opened.

    Raises:
        ChangedMeanwhileError: it says something else by now.
        UserError: the text cannot be a caption.
    """
    content = content_of(text)
    with _writing:
        _check_unchanged(path, seen)
        write_atomically(path, content)


def _check_unchanged(path: Path, seen: str) -> None:
    try:
        tag = tag_of(read_caption(path))
    except LeftOutError:
        tag = "not text any more"
    if tag != seen:
        raise ChangedMeanwhileError(f"{path.name} has changed since it was opened. It is kept as it is.")


def content_of(text: str) -> str:
    """A text as a caption file holds it.

    Raises:
        UserError: it cannot be a caption.
    """
    content = "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).strip("\n")
    if token := control_token(content):
        raise UserError(f"A caption cannot have {token}, a control token of the tokenizer.")
    if odd := UNWRITABLE.search(content):
        raise UserError(f"A caption cannot have the character {odd.group()!a}.")
    if len(content.encode()) >= LARGEST_CAPTION:
        raise UserError(f"A caption cannot have more than {LARGEST_CAPTION:,} bytes.")
    return f"{content}\n" if content else ""


def _tidied(edit: Edit) -> Edit:
    """An edit whose results are what a caption file holds, where it changes anything."""
    return lambda name, text: text if (after := edit(name, text)) == text else content_of(after)


def replacing(find: str, new: str) -> Edit:
    """Replaces a text wherever it occurs."""
    return _tidied(lambda name, text: text.replace(find, new))


def prefixing(trigger: str, *, whole: bool) -> Edit:
    """Makes every caption begin with a trigger, unless it does.

    Args:
        whole: a file is one caption; else each line is.

    Raises:
        ConfigError: it is not a word or a few words on one line.
    """
    wording = Wording("short", trigger)
    Problems(wording.problems()).raise_if_fatal()
    begins = re.compile(rf"\s*(?:$|{re.escape(trigger.strip())}(?!\w))")

    def edit(name: str, text: str) -> str:
        lines = [text] if whole else text.split("\n")
        return "\n".join(line if begins.match(line) else f"{wording.lead}{line}" for line in lines)

    return _tidied(edit)


def restoring(backup: Path) -> Reading[Edit]:
    """Undoes changes that were made at once, by what was kept of them: also what training would refuse comes back."""
    texts: Mapping[str, str] = (yield from read_json(backup, dict, "the captions of a dataset")) or {}
    return lambda name, text: texts.get(name, text)


def changes_of(files: Mapping[str, Path], edit: Edit) -> tuple[list[CaptionChange], list[str]]:
    """What an edit would change, and the names of the files that cannot be read.

    Args:
        files: the caption files by name.

    Raises:
        UserError: a result cannot be a caption.
    """
    changes, unreadable = [], []
    for name, path in files.items():
        try:
            text = read_caption(path) or ""
        except LeftOutError:
            unreadable.append(name)
            continue
        if (after := edit(name, text)) != text:
            changes.append(CaptionChange(name, path, text, after))
    return changes, unreadable


def digest_of(changes: Sequence[CaptionChange]) -> str:
    """Identifies changes, so that those which are applied are those which were seen."""
    return tag_of("".join(map(tag_of, (part for each in changes for part in (each.name, each.before, each.after)))))


def apply(changes: Iterable[CaptionChange], folder: Path) -> str:
    """Write changes; returns the name of the file in the dataset's folder that keeps what was there.

    Raises:
        ChangedMeanwhileError: a file says something else by now; those before it are written.
    """
    changes = list(changes)
    with _writing:
        backup = free_path(folder / f".captions-{datetime.now().astimezone():%Y%m%d-%H%M%S}.json")
        write_json(backup, {change.name: change.before for change in changes})
        for change in changes:
            _check_unchanged(change.path, tag_of(change.before))
            write_atomically(change.path, change.after)
        backups = [each for each in folder.glob(".captions-*") if BACKUP.fullmatch(each.name)]
        for old in sorted(backups, key=lambda path: path.stat().st_mtime_ns)[:-MOST_BACKUPS]:
            old.unlink(missing_ok=True)
    return backup.name


def exclude(config: DatasetConfig, names: AbstractSet[str], path: Path, *, out: bool) -> None:
    """Leave files out of training, or take them back.

    Args:
        path: of the entry's `exclude_files`.

    Raises:
        ConfigError: the list cannot be read; it is kept as it is.
    """
    with _writing:
        excluded = required(read_excluded(config))
        write_json(path, sorted(excluded | names if out else excluded - names))
