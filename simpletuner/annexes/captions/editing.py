"""Edits of captions on the page: a text, a batch with its backup, and the excluded files.

A caption is replaced only if it has not changed since the editor read it. Before a batch of
captions is replaced, the old texts are saved in a hidden file beside them; only the newest backups
are kept. User files are never deleted or moved.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from simpletuner.annexes.captions.wording import Wording
from simpletuner.atomic import unused_path, write_atomically, write_json
from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.json_reader import read_json
from simpletuner.data.captions import control_token, read_caption_text
from simpletuner.data.discovery import read_excluded
from simpletuner.data.files import LARGEST_CAPTION, LeftOutError
from simpletuner.errors import Problems, UserError
from simpletuner.hashing import hash_text

BACKUP = re.compile(r"\.captions-[\d-]+\.json")
MOST_BACKUPS = 3  # per folder; few, since every backup is listed as an unused file
UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # readers reject NUL; UTF-8 cannot encode surrogates
# Held between the check that a file is unchanged and its replacement.
_writing = threading.Lock()

# From the name and the text of a caption file to its new text.
Edit = Callable[[str, str], str]


class ChangedMeanwhileError(UserError):
    """A file has changed since it was opened."""


@dataclass(frozen=True)
class CaptionChange:
    """The change of a caption file; `name` is its path below the dataset's folder."""

    name: str
    path: Path
    before: str
    after: str


def read_caption(path: Path) -> str | None:
    """The text of a caption file; None if the file does not exist.

    Raises:
        LeftOutError: the file cannot be read.
    """
    return read_caption_text(path) if path.is_file() else None


def tag_of(text: str | None) -> str:
    """A hash of a caption file's text; empty if the file does not exist."""
    return "" if text is None else hash_text(text)[:32]


def write_caption(path: Path, text: str, seen: str) -> None:
    """Replace the text of a caption file.

    Args:
        seen: the tag of the text when the editor read it.

    Raises:
        ChangedMeanwhileError: the file has changed since.
        UserError: the text is not a valid caption.
    """
    content = content_of(text)
    with _writing:
        _check_unchanged(path, seen)
        write_atomically(path, content)


def _check_unchanged(path: Path, seen: str) -> None:
    """Check that a caption file still has the tag `seen`."""
    try:
        tag = tag_of(read_caption(path))
    except LeftOutError:
        tag = "unreadable"
    if tag != seen:
        raise ChangedMeanwhileError(
            f"{path.name} has changed since it was opened. It was not overwritten."
        )


def content_of(text: str) -> str:
    """The text of a caption file, without trailing spaces and with a final newline.

    Raises:
        UserError: the text is not a valid caption.
    """
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    content = "\n".join(lines).strip("\n")
    token = control_token(content)
    if token:
        raise UserError(f"A caption cannot contain {token}, a control token of the tokenizer.")
    unwritable = UNWRITABLE.search(content)
    if unwritable:
        raise UserError(f"A caption cannot contain the character {unwritable.group()!a}.")
    if len(content.encode()) >= LARGEST_CAPTION:
        raise UserError(f"A caption cannot contain {LARGEST_CAPTION:,} bytes or more.")
    return f"{content}\n" if content else ""


def _tidied(edit: Edit) -> Edit:
    """An edit that passes changed texts through `content_of`."""

    def tidied(name: str, text: str) -> str:
        new_text = edit(name, text)
        return text if new_text == text else content_of(new_text)

    return tidied


def replacing(find: str, new: str) -> Edit:
    """Replace every occurrence of a text."""
    return _tidied(lambda name, text: text.replace(find, new))


def prefixing(trigger: str, *, whole: bool) -> Edit:
    """Put a trigger before captions that do not begin with it.

    Args:
        whole: a file is one caption; otherwise every line is a caption.

    Raises:
        ConfigError: the trigger is not a word or a few words on one line.
    """
    wording = Wording("short", trigger)
    report = Problems()
    wording.check(report)
    report.raise_if_fatal()
    # Empty lines, and lines that begin with the trigger.
    kept = re.compile(rf"\s*(?:$|{re.escape(trigger.strip())}(?!\w))")

    def edit(name: str, text: str) -> str:
        captions = [text] if whole else text.split("\n")
        edited = []
        for caption in captions:
            edited.append(caption if kept.match(caption) else f"{wording.lead}{caption}")
        return "\n".join(edited)

    return _tidied(edit)


def restoring(backup: Path, report: Problems) -> Edit:
    """Undo a batch of changes from its backup, even if an old text is not a valid caption."""
    texts: Mapping[str, str] = read_json(backup, report, dict, "the captions of a dataset") or {}
    return lambda name, text: texts.get(name, text)


def changes_of(files: Mapping[str, Path], edit: Edit) -> tuple[list[CaptionChange], list[str]]:
    """The changes that an edit makes, and the names of unreadable files.

    Args:
        files: caption files by name.

    Raises:
        UserError: a new text is not a valid caption.
    """
    changes = []
    unreadable = []
    for name, path in files.items():
        try:
            text = read_caption(path) or ""
        except LeftOutError:
            unreadable.append(name)
            continue
        new_text = edit(name, text)
        if new_text != text:
            changes.append(CaptionChange(name, path, text, new_text))
    return changes, unreadable


def digest_of(changes: Sequence[CaptionChange]) -> str:
    """A hash of changes, so that only the changes that were previewed are applied."""
    tags = ""
    for change in changes:
        # Of hashes, so that text cannot move from one part to the next unnoticed.
        tags += tag_of(change.name) + tag_of(change.before) + tag_of(change.after)
    return tag_of(tags)


def apply(changes: Iterable[CaptionChange], folder: Path) -> str:
    """Back up the old texts in the dataset's folder, and write the changes.

    Returns:
        The name of the backup.

    Raises:
        ChangedMeanwhileError: a file has changed; the changes before it are written.
    """
    changes = list(changes)
    with _writing:
        backup = unused_path(folder / f".captions-{datetime.now().astimezone():%Y%m%d-%H%M%S}.json")
        write_json(backup, {change.name: change.before for change in changes})
        for change in changes:
            _check_unchanged(change.path, tag_of(change.before))
            write_atomically(change.path, change.after)
        backups = [path for path in folder.glob(".captions-*") if BACKUP.fullmatch(path.name)]
        backups.sort(key=lambda path: path.stat().st_mtime_ns)
        for old in backups[:-MOST_BACKUPS]:
            old.unlink(missing_ok=True)
    return backup.name


def exclude(config: DatasetConfig, names: AbstractSet[str], path: Path, *, out: bool) -> None:
    """Exclude files from training, or include them again.

    Args:
        path: the file in the entry's `exclude_files`.
        out: exclude the files; otherwise include them.

    Raises:
        ConfigError: the list cannot be read; it is not changed.
    """
    with _writing:
        report = Problems()
        excluded = read_excluded(config, report)
        report.raise_if_fatal()
        changed = excluded | names if out else excluded - names
        write_json(path, sorted(changed))
