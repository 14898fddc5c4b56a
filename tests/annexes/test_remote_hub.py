"""Datasets of type huggingface in a folder; `test_remote_plan` reads one from a hub."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from simpletuner.annexes.remote import hub_rows, store
from simpletuner.data.entries import DataContext
from simpletuner.data.pictures import decode
from tests.data.test_build import build, fatal
from tests.tools.web_server import Site, picture, serve


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(store, "PAUSES", (0.0, 0.0))
    with serve() as running:
        yield running


COLUMNS: dict[str, list[Any]] = {
    "caption": ["one", None, " ", "four", "five"],
    "short": [["1", "eins"], ["2"], None, ["4"], ["5"]],
    "meta": [{"title": f"title {number}"} for number in range(5)],
    "long": ["a", "b", "c", "d", "e"],
    "width": [80, 80, 80, 80, 20],
    "collection": ["fine", "fine", "fine", "poor", "fine"],
    "quality_assessment": [{"sharp": value} for value in (0.9, 0.9, 0.2, 0.9, 0.9)],
}


def write(
    folder: Path, pictures: list[Any] | None = None, kind: Any = None, **columns: list[Any]
) -> dict[str, Any]:
    """A folder as a dataset's repository has it, and an entry for it."""
    import datasets  # brings pandas along: every process would import both while it collects

    cells = pictures or [{"bytes": picture(number), "path": f"{number}.png"} for number in range(5)]
    table = datasets.Dataset.from_dict({"image": cells, **(columns or COLUMNS)})
    table = table.cast_column(
        "image", datasets.Image() if pictures is None else kind or datasets.Value("string")
    )
    (folder / "data").mkdir(parents=True)
    table.to_parquet(str(folder / "data" / "train-00000-of-00001.parquet"))
    return {"id": "hub", "type": "huggingface", "dataset_name": str(folder), "num_proc": 1}


def captions(dataset: Any) -> dict[str, tuple[str, ...]]:
    return {sample.name: sample.captions for sample in dataset.samples}


def test_hub_rows_are_saved_as_files_once(
    context: DataContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = write(tmp_path / "set") | {
        "fallback_caption_column": "meta.title",
        "description_column": "long",
    }
    (dataset,), problems = build(context, entry)
    assert not fatal(problems)
    assert captions(dataset) == {
        "0.png": ("one",),
        "1.png": ("title 1",),
        "2.png": ("title 2",),
        "3.png": ("four",),
        "4.png": ("five",),
    }
    assert dataset.samples[2].path.read_bytes() == picture(2), "undecoded, as it is in the table"
    assert all(", split train, row " in line.note for line in dataset.ledger())

    monkeypatch.setattr(hub_rows, "_load", None)
    assert build(context, entry)[0][0].samples == dataset.samples


def test_captions_of_several_columns_are_alternatives(context: DataContext, tmp_path: Path) -> None:
    (dataset,), _ = build(
        context, write(tmp_path / "set") | {"caption_column": ["caption", "short"]}
    )

    assert captions(dataset)["0.png"] == ("one", "1", "eins")
    assert [(file.name[-5:], file.reason) for file in dataset.rejected] == [("2.png", "no caption")]


def test_filters_choose_rows_by_their_columns(context: DataContext, tmp_path: Path) -> None:
    rule = {"collection": "fine", "quality_thresholds": {"sharp": 0.5}, "min_width": 64}
    (dataset,), problems = build(
        context, write(tmp_path / "set") | {"filter_func": rule, "caption_column": "long"}
    )
    assert not fatal(problems)
    assert list(captions(dataset)) == ["0.png", "1.png"]

    reason_by_row = {
        file.name.rpartition(" ")[2]: file.detail.partition(": ")[2] for file in dataset.rejected
    }
    assert reason_by_row == {
        "2": "quality_assessment.sharp is 0.2, below 0.5",
        "3": "collection is 'poor'",
        "4": "width is 20, below 64",
    }


def test_composite_picture_is_cropped_to_the_selected_part(
    context: DataContext, tmp_path: Path
) -> None:
    import datasets

    parts = [np.full((64, 80, 3), value, dtype=np.uint8) for value in (10, 120, 230)]
    wide = np.concatenate(parts, axis=1)
    file = io.BytesIO()
    Image.fromarray(wide).save(file, "PNG")
    entry = write(
        tmp_path / "set",
        [{"bytes": file.getvalue(), "path": None}],
        datasets.Image(),
        caption=["x"],
    )
    entry["composite_image_config"] = {"enabled": True, "image_count": 3, "select_index": 1}

    (dataset,), _ = build(context, entry)

    assert np.unique(np.asarray(decode(dataset.samples[0].path))).tolist() == [120]
    assert dataset.samples[0].original_size == (80, 64)


def test_hub_column_of_addresses_is_downloaded_but_paths_are_refused(
    context: DataContext, tmp_path: Path, site: Site
) -> None:
    (tmp_path / "own.png").write_bytes(picture(3))
    cells = [site.add("/a", picture(1)), str(tmp_path / "own.png"), None, site.address + "/gone"]
    entry = write(tmp_path / "set", cells, caption=list("abcd"))

    _, problems = build(context, entry)
    assert "is not a public address" in fatal(problems)[0].message

    (dataset,), problems = build(context, entry | {"allow_private_urls": True}, retry_failed=True)
    assert captions(dataset) == {"0.png": ("a",)}

    details = [file.detail.partition(";")[0] for file in dataset.rejected]
    nothing = "contains neither a file nor an http(s) address"
    assert details == [nothing, nothing, "returned HTTP 404 Not Found"]


def test_hub_dataset_reads_only_files_inside_its_folder(
    context: DataContext, tmp_path: Path
) -> None:
    import datasets

    folder = tmp_path / "set"
    folder.mkdir()
    for number, place in enumerate((folder, tmp_path)):
        (place / "own.png").write_bytes(picture(number))
    cells = [{"bytes": None, "path": str(place / "own.png")} for place in (folder, tmp_path)]
    entry = write(
        folder,
        cells,
        {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
        caption=["a", "b"],
    )
    (dataset,), _ = build(context, entry)
    assert captions(dataset) == {"0.png": ("a",)}
    assert ["is outside" in file.detail for file in dataset.rejected] == [True]
    (dataset,), _ = build(context, entry | {"allow_private_urls": True})
    assert captions(dataset) == {"0.png": ("a",), "1.png": ("b",)}


@pytest.mark.parametrize(
    ("change", "where", "words"),
    [
        (
            {"image_column": "picture"},
            "hub.image_column",
            "there is no column 'picture'; the dataset has: image,",
        ),
        ({"caption_column": "meta.titel"}, "hub.caption_column", "Did you mean 'meta.title'?"),
        ({"fps_column": "fps"}, "hub.fps_column", "there is no column 'fps'"),
        ({"split": "test"}, "hub", "Unknown split \"test\". Should be one of ['train']."),
        ({"streaming": True}, "hub.streaming", "buckets need the sizes of all files"),
        ({"dataset_name": None}, "hub.dataset_name", "is required with type huggingface."),
        (
            {"composite_image_config": {"enabled": True, "image_count": 2, "select_index": 2}},
            "hub.composite_image_config.select_index",
            "2 is beyond image_count 2",
        ),
    ],
)
def test_invalid_hub_key_is_reported_once(
    context: DataContext, tmp_path: Path, change: dict[str, Any], where: str, words: str
) -> None:
    entry = write(tmp_path / "set") | change

    # Twice: what the first start saves must not hide the problem from the second.
    for _ in range(2):
        _, problems = build(context, entry)
        (problem,) = [problem for problem in fatal(problems) if problem.where == where]
        assert words in problem.message


def test_loading_script_of_a_dataset_is_never_run(context: DataContext, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text("raise SystemExit('it was run')")

    _, problems = build(
        context, {"id": "hub", "type": "huggingface", "dataset_name": str(tmp_path / "set")}
    )

    assert "needs a loading script, which is not supported" in fatal(problems)[0].message
