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
    assert captions(
        "a.png",
        tmp_path,
        {"a.png": "a.txt"},
        caption_strategy="textfile",
        disable_multiline_split=True,
    ) == ("first\n\nsecond",)


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
def test_unusable_caption_files_say_why(
    content: bytes | None, reason: str, words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(LeftOutError, match=words) as raised:
        captions(
            "a.png",
            tmp_path,
            {"a.png": "a.txt"} if content is not None else {},
            caption_strategy="textfile",
        )
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
    with pytest.raises(
        LeftOutError, match=f"seems to be {encoding} .'{text}'.*iconv -f {encoding} -t UTF-8"
    ):
        captions("a.png", tmp_path, {"a.png": "a.txt"}, caption_strategy="textfile")


def test_bytes_of_no_likely_encoding_are_to_be_saved_as_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\x80\xff" * 9)
    with pytest.raises(LeftOutError, match=r"not UTF-8 text .byte 0.: save it as UTF-8"):
        captions("a.png", tmp_path, {"a.png": "a.txt"}, caption_strategy="textfile")


def test_file_names_are_captions(tmp_path: Path) -> None:
    assert captions("sub/a_red__house.png", tmp_path, caption_strategy="filename") == (
        "a red house",
    )
    name = unicodedata.normalize("NFD", "café.png")
    assert captions(name, tmp_path, caption_strategy="filename") == ("café",)
    with pytest.raises(LeftOutError):
        captions("__.png", tmp_path, caption_strategy="filename")


def test_instance_prompts(tmp_path: Path) -> None:
    prompts = ["sks, a dog", "a photo of sks"]
    for strategy in ("instanceprompt", "instance_prompt"):
        assert captions(
            "x.png", tmp_path, caption_strategy=strategy, instance_prompt=prompts
        ) == tuple(prompts)
    only = {
        "caption_strategy": "textfile",
        "instance_prompt": prompts,
        "only_instance_prompt": True,
    }
    assert captions("x.png", tmp_path, **only) == tuple(prompts)
    before = {
        "caption_strategy": "filename",
        "instance_prompt": prompts,
        "prepend_instance_prompt": True,
    }
    assert captions("run.png", tmp_path, **before) == ("sks, a dog run", "a photo of sks run")


def test_one_instance_prompt_may_hold_commas() -> None:
    assert DatasetConfig(id="a", instance_prompt="sks, a dog").instance_prompt == ["sks, a dog"]


def shuffled(caption: str, **settings: Any) -> list[str]:
    edit = shuffle_edit(CaptionShuffle(enable=True, **settings))
    assert edit is not None
    return list(edit(caption))


def test_shuffling_keeps_parts_and_repeats() -> None:
    caption = "a house, red, tall, old, wide"
    forms = shuffled(caption, count=3, position_start=1)
    assert forms == shuffled(caption, count=3, position_start=1)
    assert forms[0] == caption
    assert len(forms) > 2
    for form in forms:
        assert form.startswith("a house, ")
        assert sorted(form.split(", ")) == sorted(caption.split(", "))
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
    with problems.within("text") as of_text:
        edit = read_filters(entries, of_text)
    assert not problems, problems
    assert edit is not None
    return edit(caption)[0]


def test_filters_take_texts_expressions_and_replacements(tmp_path: Path) -> None:
    assert filtered("a house, 4k, best quality", [", best quality", ", 4k"]) == "a house"
    assert filtered("a house (large), image 12", [r",\s*image \d+"]) == "a house (large)"
    assert (
        filtered("a (b) c", ["(b)"]) == "a c"
    )  # plain text where the caption holds it, though it is an expression
    assert filtered("a grey car", ["s/grey/gray/"]) == "a gray car"
    assert filtered("x/y 12", [r"s/(\d)(\d)/\2\1/", r"s/x\/y/z/"]) == "z 21"
    (tmp_path / "list.txt").write_text("grey \n\ns/car/bus/\n", encoding="utf-8")
    (tmp_path / "list.json").write_text('["grey ", "s/car/bus/"]', encoding="utf-8")
    for name in ("list.txt", "list.json"):
        assert filtered("a grey car", str(tmp_path / name)) == "a bus"
    (tmp_path / "one.json").write_text('"s/grey/red/"', encoding="utf-8")
    assert filtered("a grey car", str(tmp_path / "one.json")) == "a red car"


@pytest.mark.parametrize(
    "value", [["s/(/x/"], [r"s/a/\1/"], [1], {"a": 1}, "nowhere.txt", "a\0b", "a\0b.json"]
)
def test_filters_that_cannot_be_read_are_problems(value: Any) -> None:
    problems = Problems()
    with problems.within("text") as of_text:
        read_filters(value, of_text)
    assert [problem.where for problem in problems] == ["text.caption_filter_list"]


def test_a_caption_that_is_filtered_away_is_reported(tmp_path: Path) -> None:
    edit = read_filters(["house"], Problems())
    config = DatasetConfig(id="a", caption_strategy="filename")
    source = CaptionSource(config, Folder(tmp_path, {}), {}, (edit,) if edit else ())
    with pytest.raises(LeftOutError, match="caption_filter_list"):
        captions_for("house.png", source)
