"""Captions that lie in a folder are used, or the plan says how to use them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.datasets import DatasetConfig
from simpletuner.data.build import build_datasets
from simpletuner.data.caption_checks import LOOKED_INTO
from simpletuner.data.captions import is_one_text
from simpletuner.data.dataset import Dataset, DatasetFile
from simpletuner.data.entries import DataContext
from simpletuner.errors import Problem, Problems
from tests.tools import pictures

ROW = json.dumps({"file_name": "a.png", "text": "a cat"})
LISTED = json.dumps({"image_path": "/data/a.png", "caption": "a cat"})
# What other programs write, and what to do about it.
SOURCES = {
    "a.txt": ("a cat", "set caption_strategy to textfile"),
    "a.png.txt": ("a cat", "set caption_strategy to textfile"),
    "a.caption": ("a cat", "set caption_strategy to textfile"),
    "metadata.jsonl": (ROW, "To use metadata.jsonl, set caption_strategy to metadata."),
    "metadata.csv": (
        "file_name,text\na.png,a cat",
        "To use metadata.csv, set caption_strategy to metadata.",
    ),
    "captions.jsonl": (
        LISTED,
        "captions.jsonl lists captions: rename it to metadata.jsonl and set",
    ),
    "captions.csv": (
        "image,caption\na.png,a cat",
        "captions.csv lists captions: rename it to metadata.csv, name",
    ),
    "meta_cap.json": (
        json.dumps({"a": {"caption": "a cat"}}),
        "meta_cap.json lists captions, which are not read",
    ),
    "all.parquet": ("PAR1", "all.parquet may list captions: metadata_backend parquet reads"),
    "a.json": (
        json.dumps({"caption": "a cat"}),
        "1 .json file beside pictures or clips (a.json) holds captions",
    ),
    "a.png.json": (
        json.dumps({"prompt": "a cat"}),
        "1 .json file beside pictures or clips (a.png.json) holds captions",
    ),
    "a.tags": (
        "cat, grey",
        "1 .tags file beside pictures or clips (a.tags) may hold captions: rename them to .txt.",
    ),
}
# The strategies that use a source.
USED = {
    "textfile": {"a.txt", "a.png.txt", "a.caption"},
    "metadata": {"metadata.jsonl", "metadata.csv"},
}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    pictures.photograph(tmp_path / "photos" / "a.png", (64, 64))
    return tmp_path / "photos"


def build(context: DataContext, root: Path, **keys: Any) -> tuple[Dataset, list[Problem]]:
    problems = Problems()
    config = DatasetConfig(id="set", instance_data_dir=str(root), **keys)
    (dataset,) = build_datasets([config], context, problems)
    return dataset, problems


@pytest.mark.parametrize("strategy", [None, "filename", "instanceprompt", "textfile", "metadata"])
@pytest.mark.parametrize("source", SOURCES)
def test_captions_are_used_or_the_plan_says_how_to_use_them(
    source: str, strategy: str | None, context: DataContext, photos: Path
) -> None:
    content, remedy = SOURCES[source]
    (photos / source).write_text(content)
    prompt = {"instance_prompt": "zkt"} if strategy == "instanceprompt" else {}

    dataset, problems = build(context, photos, caption_strategy=strategy, **prompt)

    if source in USED.get(strategy or "", ()):
        assert not problems
        assert dataset.samples[0].captions == ("a cat",)
    elif strategy == "metadata":
        assert "contains neither" in problems[0].message
    else:
        assert [remedy in problem.message for problem in problems].count(True) == 1
        assert all(problem.fatal == (not dataset.samples) for problem in problems)


IN_THE_PROMPT = {
    "caption_strategy": "filename",
    "instance_prompt": "zkt",
    "only_instance_prompt": True,
}


@pytest.mark.parametrize(
    ("keys", "unused"), [({"caption_strategy": "textfile"}, 1), (IN_THE_PROMPT, 2)]
)
def test_a_table_is_not_mentioned_where_nothing_lacks_it(
    keys: dict[str, Any], unused: int, context: DataContext, photos: Path
) -> None:
    for name in ("a.txt", "metadata.jsonl", "a.json"):
        (photos / name).write_text(SOURCES[name][0])

    dataset, problems = build(context, photos, **keys)

    assert not problems
    assert dataset.counts()["unused caption"] == unused


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"title": "IMG_1.HEIC", "description": ""}'),  # of Google Takeout
        ("dataset_info.json", "{}"),
        ("log.jsonl", '{"step": 1}'),
        ("table.csv", "step,loss\n1,0.5"),
        ("a.npz", "PK"),
    ],
)
def test_files_without_captions_are_not_taken_for_captions(
    name: str, content: str, context: DataContext, photos: Path
) -> None:
    (photos / name).write_text(content)
    assert build(context, photos, caption_strategy="filename")[1] == []


def test_only_the_first_of_many_tables_are_named(context: DataContext, photos: Path) -> None:
    for number in range(100):
        (photos / f"shard-{number:03}.json").write_text(LISTED)

    problems = build(context, photos, caption_strategy="filename")[1]

    assert [problem.message.partition(" ")[0] for problem in problems] == [
        "shard-000.json",
        "shard-001.json",
        "shard-002.json",
    ]


def test_a_pipe_is_not_opened_to_look_for_captions(context: DataContext, photos: Path) -> None:
    os.mkfifo(photos / "captions.jsonl")
    pipe = os.open(photos / "captions.jsonl", os.O_RDWR)
    # As many bytes as are looked at, so that opening it would not block this test.
    os.write(pipe, LISTED.encode().ljust(LOOKED_INTO))

    problems = build(context, photos, caption_strategy="filename")[1]

    os.close(pipe)
    assert not problems


PARAGRAPHS = (
    f"{'A grey cat sleeps on a wooden chair. ' * 3}\n\n{'The light is soft and warm. ' * 4}"
)
TEXTS = {
    "json": json.dumps({"subject": "a cat", "light": "soft"}, indent=2),
    "json list": json.dumps(["a cat", "a chair"], indent=2),
    "bullets": "- a grey cat\n- a wooden chair",
    "numbers": "1. a grey cat\n2. a wooden chair",
    "headings": "# Subject\na grey cat",
    "bold": "**Subject**\na grey cat",
    "introduction": "Here is the caption:\na grey cat",
    "fence": "```\na grey cat\n```",
    "paragraphs": PARAGRAPHS,
    "wrapped": f"{'A grey cat sleeps on a wooden chair in ' * 3}\nthe kitchen, beside a window.",
}
ALTERNATIVES = {
    "one": "a grey cat",
    "two": "a grey cat\nan animal on a chair",
    "blank line": "a grey cat\n\nan animal on a chair",
    "sentences": (
        "A grey cat sleeps on a wooden chair. " * 3
        + "\n"
        + "The cat is asleep in the kitchen. " * 3
    ),
    "tags": "1girl, solo, smile\n1girl, standing",
    "hindi": "कुर्सी पर बिल्ली\nएक जानवर",
    "wildcards": "{red|blue} hair\n{long|short} hair",
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_split_into_lines_is_named_with_its_key(
    kind: str, context: DataContext, photos: Path
) -> None:
    (photos / "a.txt").write_text(TEXTS[kind])

    dataset, (problem,) = build(context, photos, caption_strategy="textfile")

    count = len(dataset.samples[0].captions)
    message = str(problem)

    assert problem.where == "set.disable_multiline_split"
    assert f"the lines of 1 of 1 caption file become {count} captions each, such as " in message
    assert "of a.txt. These files seem to hold one text each: to keep it whole, set" in message


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_is_kept_whole_is_one_caption(
    kind: str, context: DataContext, photos: Path
) -> None:
    (photos / "a.txt").write_text(TEXTS[kind])

    dataset, problems = build(
        context, photos, caption_strategy="textfile", disable_multiline_split=True
    )

    assert not problems
    assert len(dataset.samples[0].captions) == 1


def test_a_text_that_is_split_is_named_in_every_plan(context: DataContext, photos: Path) -> None:
    (photos / "a.txt").write_text(TEXTS["json"])
    dataset, first_problems = build(context, photos, caption_strategy="textfile")
    dataset.save_index()

    _, second_problems = build(context, photos, caption_strategy="textfile")

    assert first_problems
    assert second_problems == first_problems


@pytest.mark.parametrize("kind", ALTERNATIVES)
def test_alternatives_are_not_taken_for_one_text(kind: str) -> None:
    assert not is_one_text([line.strip() for line in ALTERNATIVES[kind].split("\n")])


@pytest.mark.parametrize(
    ("folder", "advice"),
    [
        ("10_zkt woman", "the folder '10_zkt woman' are not read from its name: set repeats to 9;"),
        ("3_a_cat", "set repeats to 2;"),
        ("1_zkt", ""),
        ("cats", ""),
        ("2024_summer", ""),
        ("001_cats", ""),
        ("100_FUJI", ""),  # of a camera
    ],
)
@pytest.mark.parametrize("is_root", [False, True])
def test_unread_repeats_in_the_name_of_a_folder_are_reported(
    folder: str, advice: str, is_root: bool, context: DataContext, tmp_path: Path
) -> None:
    pictures.photograph(tmp_path / folder / "a.png", (64, 64))
    root = tmp_path / folder if is_root else tmp_path

    _, problems = build(context, root, caption_strategy="filename")
    _, problems_with_repeats = build(context, root, caption_strategy="filename", repeats=4)

    assert [problem.where for problem in problems] == (["set.repeats"] if advice else [])
    assert advice in "".join(map(str, problems))
    assert not problems_with_repeats


@pytest.mark.parametrize(
    ("text", "written"),
    [("a.caption", "a.caption"), ("a.png.txt", "a.png.txt"), ("b.txt", "a.txt")],
)
def test_a_caption_is_written_where_it_is_read(
    text: str, written: str, context: DataContext, photos: Path
) -> None:
    (photos / text).write_text("")

    dataset, _ = build(context, photos, caption_strategy="filename")

    assert DatasetFile(dataset, "a.png").caption_path == photos / written
