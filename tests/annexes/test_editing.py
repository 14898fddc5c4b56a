"""Editing captions overwrites nothing unseen, previews changes of many files, and loses nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from simpletuner.annexes.captions import editing
from simpletuner.annexes.captions.editing import (
    ChangedMeanwhileError,
    apply,
    changes_of,
    content_of,
    digest_of,
    prefixing,
    replacing,
    restoring,
    tag_of,
    write_caption,
)
from simpletuner.data.files import LARGEST_CAPTION
from simpletuner.errors import DiskFullError, Problems, UserError

TEXTS = {"a.txt": "a red cat\n", "b.txt": "two\nlines of a cat", "c.txt": "", "d.txt": "a dog\n"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    return {name: tmp_path / name for name in TEXTS}


def texts(files: dict[str, Path]) -> dict[str, str]:
    return {name: path.read_text() for name, path in files.items()}


def test_caption_that_changed_on_disk_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_caption(path, "  first \r\n\nsecond\n\n", "")
    assert path.read_bytes() == b"  first\n\nsecond\n"
    with pytest.raises(ChangedMeanwhileError, match=r"a\.txt has changed"):
        write_caption(path, "other", "")

    write_caption(path, "", tag_of(path.read_text()))
    assert path.read_bytes() == b""

    path.write_bytes(b"caf\xe9")  # by an editor that saves Latin-1
    with pytest.raises(ChangedMeanwhileError):
        write_caption(path, "coffee", tag_of(""))
    assert path.read_bytes() == b"caf\xe9"


@pytest.mark.parametrize("text", ["a <|im_end|> b", "a\0b", "half \ud83d", "x" * LARGEST_CAPTION])
def test_caption_that_training_would_refuse_is_not_written(text: str) -> None:
    with pytest.raises(UserError, match="A caption cannot contain"):
        content_of(text)


def test_replacement_is_previewed_and_can_be_undone(files: dict[str, Path], tmp_path: Path) -> None:
    changes, unreadable = changes_of(files, replacing("cat", "fox"))
    assert [(change.name, change.before, change.after) for change in changes] == [
        ("a.txt", "a red cat\n", "a red fox\n"),
        ("b.txt", "two\nlines of a cat", "two\nlines of a fox\n"),
    ]
    assert (unreadable, texts(files)) == ([], TEXTS)

    backup = apply(changes, tmp_path)
    assert texts(files) == TEXTS | {"a.txt": "a red fox\n", "b.txt": "two\nlines of a fox\n"}

    undone, _ = changes_of(files, restoring(tmp_path / backup, Problems()))
    assert apply(undone, tmp_path) != backup
    assert texts(files) == TEXTS


def test_only_the_newest_backups_are_kept(tmp_path: Path) -> None:
    foreign = tmp_path / ".captions-of-mine.json"
    path = tmp_path / "a.txt"
    path.write_text("a")
    foreign.touch()
    backups = []

    for number in range(5):
        backups.append(
            apply(changes_of({"a.txt": path}, lambda name, text: f"{text}a")[0], tmp_path)
        )
        os.utime(tmp_path / backups[-1], (number, number))

    assert {path.name for path in tmp_path.glob(".captions-*")} == {foreign.name, *backups[-3:]}


def test_undo_restores_captions_that_training_refuses(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("a.txt", "b.txt")}
    for path in files.values():
        path.write_text("a cat <|im_end|> ")

    backup = apply(changes_of(files, replacing("<|im_end|>", ""))[0], tmp_path)
    assert texts(files) == dict.fromkeys(files, "a cat\n")

    apply(changes_of(files, restoring(tmp_path / backup, Problems()))[0], tmp_path)
    assert texts(files) == dict.fromkeys(files, "a cat <|im_end|> ")


def test_digest_changes_with_the_changes(files: dict[str, Path]) -> None:
    def digest() -> str:
        return digest_of(changes_of(files, replacing("cat", "fox"))[0])

    before = digest()
    assert before == digest()

    files["a.txt"].write_text("a blue cat\n")
    assert before != digest()


def test_full_disk_during_a_replacement_leaves_whole_captions_and_a_backup(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, _ = changes_of(files, replacing("a", "e"))
    write = editing.write_atomically

    def full(path: Path, text: str) -> None:
        if path.name == "b.txt":
            raise DiskFullError("full")
        write(path, text)

    monkeypatch.setattr(editing, "write_atomically", full)

    with pytest.raises(DiskFullError):
        apply(changes, tmp_path)
    assert texts(files) == TEXTS | {"a.txt": "e red cet\n"}

    (backup,) = tmp_path.glob(".captions-*.json")
    assert json.loads(backup.read_text()) == {
        name: text for name, text in TEXTS.items() if "a" in text
    }


def test_file_that_changed_since_the_preview_is_not_overwritten(
    files: dict[str, Path], tmp_path: Path
) -> None:
    changes, _ = changes_of(files, replacing("cat", "fox"))
    files["a.txt"].write_text("mine\n")

    with pytest.raises(ChangedMeanwhileError):
        apply(changes, tmp_path)
    assert files["a.txt"].read_text() == "mine\n"


@pytest.mark.parametrize(
    ("text", "whole", "expected"),
    [
        ("a cat\n", False, "zkt, a cat\n"),
        ("one\n\ntwo", False, "zkt, one\n\nzkt, two\n"),
        ("one\ntwo", True, "zkt, one\ntwo\n"),
        ("zkt, a cat", False, "zkt, a cat"),
        (" zkt in a box", False, " zkt in a box"),
        ("zkts are many", False, "zkt, zkts are many\n"),
        ("", False, ""),
    ],
)
def test_trigger_is_prefixed_once_to_every_caption(text: str, whole: bool, expected: str) -> None:
    assert prefixing("zkt", whole=whole)("a.txt", text) == expected


def test_trigger_with_a_line_break_is_refused() -> None:
    with pytest.raises(UserError, match="on one line"):
        prefixing("two\nlines", whole=False)
