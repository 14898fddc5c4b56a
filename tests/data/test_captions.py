"""Captions from text files, file names and prompts, and the edits of them."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.datasets import CaptionShuffle, DatasetConfig
from simpletuner.data.captions import (
    CaptionSource,
    captions_for,
    read_caption_file,
    read_filters,
    shuffle_edit,
)
from simpletuner.data.discovery import Folder, Scan
from simpletuner.data.files import LeftOutError
from simpletuner.errors import Problems


def captions(
    name: str,
    root: Path,
    files: dict[str, str] | None = None,
    table: dict[str, Any] | None = None,
    **keys: Any,
) -> tuple[str, ...]:
    config = DatasetConfig(id="set", **keys)
    folder = Folder(root, {}, Scan(captions=files or {}))
    return captions_for(name, CaptionSource(config, folder, table or {}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a red house", ("a red house",)),
        (b"first\nsecond\n\n  third  \n", ("first", "second", "third")),
        (b"\xef\xbb\xbfwith a mark\r\nand windows lines\r\n", ("with a mark", "and windows lines")),
        ("सुनहरी चाय\n红色的房子".encode(), ("सुनहरी चाय", "红色的房子")),
        ("wide".encode("utf-16"), ("wide",)),
        ("one\u2028line".encode(), ("one\u2028line",)),
    ],
)
def test_each_line_of_a_text_file_is_an_alternative(
    content: bytes, expected: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert read_caption_file(tmp_path / "a.txt").captions == expected
    assert captions("a.png", tmp_path, {"a.png": "a.txt"}, caption_strategy="textfile") == expected


def test_the_whole_file_may_be_one_caption(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"first\r\n\r\nsecond \n")
    keys = {"caption_strategy": "textfile", "disable_multiline_split": True}

    assert captions("a.png", tmp_path, {"a.png": "a.txt"}, **keys) == ("first\n\nsecond",)


@pytest.mark.parametrize(
    ("content", "reason", "words"),
    [
        (b"", "no caption", "empty"),
        (b" \r\n\n", "no caption", "empty"),
        (b"caf\xe9", "unreadable caption", "not UTF-8"),
        (b"c\0a\0t\0", "unreadable caption", "UTF-16 without a byte order mark"),
        (None, "no caption", "no caption file"),
    ],
)
def test_an_unusable_caption_file_is_left_out_with_the_reason(
    content: bytes | None, reason: str, words: str, tmp_path: Path
) -> None:
    files: dict[str, str] = {}
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
        files["a.png"] = "a.txt"

    with pytest.raises(LeftOutError, match=words) as raised:
        captions("a.png", tmp_path, files, caption_strategy="textfile")

    assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("une fenêtre à midi", "WINDOWS-1252"),
        ("café", "WINDOWS-1252"),
        ("рыжий кот, zkt", "WINDOWS-1251"),
        ("窓辺の猫、写真", "SHIFT_JIS"),
        ("一只红色的猫睡在窗边", "GB18030"),
        ("창문에서 자는 고양이", "EUC-KR"),
    ],
)
def test_a_text_that_is_not_utf8_names_its_likely_encoding(
    text: str, encoding: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    advice = f"seems to be {encoding} .'{text}'.*iconv -f {encoding} -t UTF-8"

    with pytest.raises(LeftOutError, match=advice):
        captions("a.png", tmp_path, {"a.png": "a.txt"}, caption_strategy="textfile")


def test_bytes_of_no_likely_encoding_are_to_be_saved_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x80\xff" * 9)
    with pytest.raises(LeftOutError, match=r"not UTF-8 text .byte 0.: save it as UTF-8"):
        captions("a.png", tmp_path, {"a.png": "a.txt"}, caption_strategy="textfile")


def test_file_names_are_captions(tmp_path: Path) -> None:
    captions_of_name = captions("sub/a_red__house.png", tmp_path, caption_strategy="filename")
    assert captions_of_name == ("a red house",)


def test_file_names_are_composed(tmp_path: Path) -> None:
    """macOS stores names decomposed."""
    name = unicodedata.normalize("NFD", "café.png")
    assert captions(name, tmp_path, caption_strategy="filename") == ("café",)


def test_a_file_name_without_letters_is_not_a_caption(tmp_path: Path) -> None:
    with pytest.raises(LeftOutError):
        captions("__.png", tmp_path, caption_strategy="filename")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"caption_strategy": "instanceprompt"}, ("sks, a dog", "a photo of sks")),
        ({"caption_strategy": "instance_prompt"}, ("sks, a dog", "a photo of sks")),
        (
            {"caption_strategy": "textfile", "only_instance_prompt": True},
            ("sks, a dog", "a photo of sks"),
        ),
        (
            {"caption_strategy": "filename", "prepend_instance_prompt": True},
            ("sks, a dog run", "a photo of sks run"),
        ),
    ],
)
def test_instance_prompts_replace_captions_or_precede_them(
    keys: dict[str, Any], expected: tuple[str, ...], tmp_path: Path
) -> None:
    prompts = ["sks, a dog", "a photo of sks"]
    assert captions("run.png", tmp_path, instance_prompt=prompts, **keys) == expected


def test_one_instance_prompt_may_hold_commas() -> None:
    assert DatasetConfig(id="a", instance_prompt="sks, a dog").instance_prompt == ["sks, a dog"]


def shuffled(caption: str, **settings: Any) -> list[str]:
    edit = shuffle_edit(CaptionShuffle(enable=True, **settings))
    assert edit is not None
    return list(edit(caption))


def test_shuffling_keeps_the_first_parts_in_place() -> None:
    caption = "a house, red, tall, old, wide"

    forms = shuffled(caption, count=3, position_start=1)

    assert forms[0] == caption
    assert len(forms) > 2
    for form in forms:
        assert form.startswith("a house, ")
        assert sorted(form.split(", ")) == sorted(caption.split(", "))


def test_shuffling_depends_on_the_seed_alone() -> None:
    caption = "a house, red, tall, old, wide"
    assert shuffled(caption, count=3) == shuffled(caption, count=3)
    assert shuffled(caption, count=3, seed=1) != shuffled(caption, count=3)


def test_shuffling_by_words_and_sentences() -> None:
    assert sorted(shuffled("b a", split_on="space", count=8)) == ["a b", "b a"]
    assert sorted(shuffled("B. A.", split_on="period", count=8)) == ["A. B.", "B. A."]
    assert shuffled("one", include_original=False) == ["one"]


def test_shuffling_is_off_unless_asked_for() -> None:
    assert shuffle_edit(None) is None
    assert shuffle_edit(CaptionShuffle(count=5)) is None


def filtered(caption: str, entries: Any) -> str:
    problems = Problems()
    edit = read_filters(entries, problems)
    assert not problems, problems
    assert edit is not None
    return edit(caption)[0]


@pytest.mark.parametrize(
    ("caption", "entries", "expected"),
    [
        ("a house, 4k, best quality", [", best quality", ", 4k"], "a house"),
        ("a house (large), image 12", [r",\s*image \d+"], "a house (large)"),
        # Plain text where the caption holds it, though it is an expression, too.
        ("a (b) c", ["(b)"], "a c"),
        ("a grey car", ["s/grey/gray/"], "a gray car"),
        ("x/y 12", [r"s/(\d)(\d)/\2\1/", r"s/x\/y/z/"], "z 21"),
    ],
)
def test_filters_take_texts_expressions_and_replacements(
    caption: str, entries: list[str], expected: str
) -> None:
    assert filtered(caption, entries) == expected


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("list.txt", "grey \n\ns/car/bus/\n", "a bus"),
        ("list.json", '["grey ", "s/car/bus/"]', "a bus"),
        ("text.json", '"s/grey/red/"', "a red car"),
    ],
)
def test_filters_are_read_from_a_file(
    name: str, content: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert filtered("a grey car", str(tmp_path / name)) == expected


@pytest.mark.parametrize(
    "value", [["s/(/x/"], [r"s/a/\1/"], [1], {"a": 1}, "nowhere.txt", "a\0b", "a\0b.json"]
)
def test_filters_that_cannot_be_read_are_problems(value: Any) -> None:
    problems = Problems()

    with problems.within("text") as text_report:
        read_filters(value, text_report)

    assert [problem.where for problem in problems] == ["text.caption_filter_list"]


def test_a_caption_that_filters_leave_empty_is_left_out(tmp_path: Path) -> None:
    edit = read_filters(["house"], Problems())
    config = DatasetConfig(id="a", caption_strategy="filename")
    source = CaptionSource(config, Folder(tmp_path, {}), {}, (edit,) if edit else ())

    with pytest.raises(LeftOutError, match="caption_filter_list"):
        captions_for("house.png", source)
