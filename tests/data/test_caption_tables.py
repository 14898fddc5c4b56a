"""Captions from parquet tables, and from the metadata.jsonl and metadata.csv of other programs."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.datasets import DatasetConfig, ParquetConfig
from simpletuner.data.build import build_datasets
from simpletuner.data.caption_tables import Row, match_rows, read_metadata, read_parquet
from simpletuner.data.discovery import Folder, scan
from simpletuner.data.entries import DataContext
from simpletuner.errors import Problems
from tests.tools import pictures
from tests.tools.reports import read_by


@pytest.fixture
def table(tmp_path: Path) -> ParquetConfig:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "file": ["sub/a.png", "b.jpg", "gone.png", unicodedata.normalize("NFD", "é.png")],
        "text": ["from a path", None, "x", ""],
        "alt": ["unused", "from the fallback", "x", "accent"],
        "many": [["one", "two"], [], [" "], None],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    return ParquetConfig(
        path=str(tmp_path / "t.parquet"),
        filename_column="file",
        caption_column="text",
        fallback_caption_column="alt",
    )


def test_tables_name_pictures_by_path_or_name(table: ParquetConfig) -> None:
    rows, problems = read_by(read_parquet, table)
    names = ["sub/a.png", "deep/b.jpg", "é.png", "other.png"]
    matched, warnings = read_by(match_rows, rows, names, "parquet")

    assert matched == {
        "sub/a.png": ("from a path",),
        "deep/b.jpg": ("from the fallback",),
        "é.png": ("accent",),
    }
    assert not problems
    assert [str(problem) for problem in warnings] == [
        "parquet: no picture for 1 name in the table: gone.png."
    ]


@pytest.mark.parametrize(
    ("rows", "names", "words"),
    [
        (
            ["x.png"],
            ["cats/x.png", "dogs/x.png"],
            "1 name in the table could be several files: x.png is cats/x.png and",
        ),
        (["x.png", "x.png"], ["x.png"], "several rows with different captions for 1 file: x.png"),
        (
            ["cats/x.png", "cats/x.png"],
            ["cats/x.png"],
            "several rows with different captions for 1 file: cats/x.png",
        ),
        (
            ["cats/x.png", "x.png"],
            ["cats/x.png"],
            "several rows with different captions for 1 file: x.png",
        ),
    ],
)
def test_a_row_that_fits_several_files_or_a_file_with_several_rows_is_refused(
    rows: Sequence[str], names: Sequence[str], words: str
) -> None:
    numbered = [(row, (f"caption {number}",)) for number, row in enumerate(rows)]

    _, (problem,) = read_by(match_rows, numbered, names, "parquet")

    assert problem.fatal
    assert words in problem.message
    assert "below the dataset's folder into the table" in problem.message


@pytest.mark.parametrize(
    ("rows", "names", "matched"),
    [
        (["x.png"], ["x.png", "dogs/x.png"], {"x.png": "x.png"}),  # the path of the first
        (
            ["cats/x.png", "dogs/x.png"],
            ["cats/x.png", "dogs/x.png"],
            {"cats/x.png": "cats/x.png", "dogs/x.png": "dogs/x.png"},
        ),
        (
            ["x.png", "y.png"],
            ["cats/x.png", "dogs/y.png"],
            {"cats/x.png": "x.png", "dogs/y.png": "y.png"},
        ),
    ],
)
def test_a_row_names_a_file_by_its_path_or_else_by_its_unique_name(
    rows: Sequence[str], names: Sequence[str], matched: dict[str, str]
) -> None:
    table = [(row, (row,)) for row in rows]

    captions, problems = read_by(match_rows, table, names, "parquet")

    assert not problems
    assert captions == {name: (row,) for name, row in matched.items()}


def test_a_row_that_is_repeated_counts_once(table: ParquetConfig) -> None:
    rows: list[Row] = [("x.png", ("a cat",)), ("x.png", ("a cat",))]
    assert read_by(match_rows, rows, ["x.png"], "parquet") == ({"x.png": ("a cat",)}, [])


def test_a_list_column_holds_alternatives(table: ParquetConfig) -> None:
    rows, _ = read_by(read_parquet, table.model_copy(update={"caption_column": "many"}))
    assert [captions for _, captions in rows][:2] == [("one", "two"), ("from the fallback",)]


def test_names_without_extension_mean_png(table: ParquetConfig) -> None:
    table = table.model_copy(update={"identifier_includes_extension": False})

    rows, _ = read_by(read_parquet, table)

    assert "b.jpg.png" in dict(rows)


def test_a_missing_column_is_reported_with_those_that_exist(table: ParquetConfig) -> None:
    table = table.model_copy(update={"caption_column": "texts", "width_column": "w"})

    rows, (caption, width) = read_by(read_parquet, table)

    assert rows == []
    assert caption.where == "parquet.caption_column"
    assert "file, text, alt, many" in caption.message
    assert "Did you mean 'text'?" in caption.message
    assert width.where == "parquet.width_column"


@pytest.mark.parametrize("name", ["missing.parquet", "bad.parquet"])
def test_a_table_that_is_missing_or_damaged_is_reported(
    name: str, table: ParquetConfig, tmp_path: Path
) -> None:
    (tmp_path / "bad.parquet").write_text("no table")
    table = table.model_copy(update={"path": str(tmp_path / name)})

    _, (problem,) = read_by(read_parquet, table)

    assert problem.where == "parquet.path"


def test_without_pyarrow_a_table_is_reported_with_the_package(
    table: ParquetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)

    _, problems = read_by(read_parquet, table)

    assert "pip install 'pyarrow>=" in problems[-1].message


def folder_with(root: Path, files: Sequence[str], **tables: str) -> Folder:
    """A folder of pictures with metadata tables, named `sub/jsonl` for `sub/metadata.jsonl`."""
    for name in files:
        pictures.photograph(root / name, (64, 64))
    for place, content in tables.items():
        path = root / Path(place).parent / f"metadata.{Path(place).name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return Folder(root, {}, scan(root))


def lines(*records: dict[str, Any]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


@pytest.mark.parametrize("column", ["text", "caption", "prompt"])
@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_the_tables_of_an_image_folder_are_read(column: str, kind: str, tmp_path: Path) -> None:
    contents = {
        "jsonl": lines(
            {"file_name": "a.png", column: 'a "cat", asleep'},
            {"file_name": "sub/b.png", column: "a dog"},
        ),
        "csv": f'\ufefffile_name,{column}\r\na.png,"a ""cat"", asleep"\r\nsub/b.png,a dog\r\n',
    }
    folder = folder_with(tmp_path, ["a.png", "sub/b.png"], **{kind: contents[kind]})

    rows, problems = read_by(read_metadata, folder)

    assert not problems
    assert dict(rows) == {"a.png": ('a "cat", asleep',), "sub/b.png": ("a dog",)}


def test_every_sub_folder_may_have_a_table(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        ["train/0.png", "test/0.png"],
        **{
            "train/jsonl": lines({"file_name": "0.png", "text": "train"}),
            "test/jsonl": lines({"file_name": "0.png", "text": "test"}),
        },
    )

    rows, problems = read_by(read_metadata, folder)

    assert not problems
    assert dict(rows) == {"train/0.png": ("train",), "test/0.png": ("test",)}


@pytest.mark.parametrize("column", ["image_path", "video_path"])
@pytest.mark.parametrize("place", ["here", "moved", "elsewhere"])
def test_full_paths_name_files_of_the_folder_even_after_a_move(
    column: str, place: str, tmp_path: Path
) -> None:
    folders = {
        "here": tmp_path / "set",
        "moved": Path("/nowhere"),
        "elsewhere": tmp_path / "elsewhere",
    }
    pictures.photograph(tmp_path / "elsewhere" / "a.png", (64, 64))
    path = str(folders[place] / "a.png")
    table = lines({column: path, "caption": "a cat"})
    folder = folder_with(tmp_path / "set", ["a.png"], jsonl=table)

    rows, problems = read_by(read_metadata, folder)

    assert not problems
    # The picture elsewhere is another file of that name.
    assert ("a.png" in dict(rows)) == (place != "elsewhere")


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({}, "'metadata' reads metadata.jsonl or metadata.csv, and "),
        (
            {"jsonl": "{}", "csv": "file_name,text\n"},
            "contains both metadata.jsonl and metadata.csv",
        ),
        ({"jsonl": '{"file_name": "a.png"}\n{"file_name"'}, "line 2 is not valid JSON"),
        ({"jsonl": "[" * 100_000}, "line 1 cannot be used"),
        ({"jsonl": '{"file_name": "a.png", "text": "\\ud800"}'}, "line 1 cannot be used"),
        ({"jsonl": '["a.png"]'}, "line 1 is not a JSON object."),
        (
            {"jsonl": '{"file_name": "a.png", "label": 3}'},
            "columns text, caption, prompt; it has: file_name, label.",
        ),
        (
            {"csv": "image,text\na.png,a cat\n"},
            "columns file_name, image_path, video_path; it has: image, text.",
        ),
        ({"csv": "file_name;text\na.png;a cat\n"}, "Columns must be separated by commas."),
        ({"csv": f"file_name,text\na.png,{'x' * 200_000}\n"}, "is not a CSV table"),
    ],
)
def test_a_table_that_cannot_be_read_is_reported_with_the_reason(
    tables: dict[str, str], words: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, ["a.png"], **tables)

    _, problems = read_by(read_metadata, folder)

    (problem,) = [problem for problem in problems if problem.fatal]
    assert words in str(problem)


def test_a_dataset_trains_the_captions_of_its_table(context: DataContext, tmp_path: Path) -> None:
    rows = lines(
        {"file_name": "a.png", "text": ["a cat", "a pet"]}, {"file_name": "gone.png", "text": "x"}
    )
    folder = folder_with(tmp_path / "set", ["a.png", "b.png"], jsonl=rows)
    config = DatasetConfig(
        id="set", instance_data_dir=str(folder.root), caption_strategy="metadata"
    )
    problems = Problems()

    (dataset,) = build_datasets([config], context, problems)

    captions = {sample.name: sample.captions for sample in dataset.samples}
    assert captions == {"a.png": ("a cat", "a pet")}
    assert dataset.counts() == {"no caption": 1}

    messages = " ".join(map(str, problems))
    assert "no picture for 1 name in the table: gone.png" in messages
    assert "1 no caption (b.png)" in messages
