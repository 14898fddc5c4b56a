"""The dataset file: every key of an entry, references between entries, all problems at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.datasets import DatasetConfig, read_datasets, without_effect
from simpletuner.errors import Problems
from tests.tools.reports import found_by

PICTURES: dict[str, Any] = {"id": "pictures", "instance_data_dir": "datasets/pictures"}
TEXT: dict[str, Any] = {"id": "text", "dataset_type": "text_embeds", "cache_dir": "cache"}
PLACEHOLDERS = {"model_family": "kandinsky5-image", "output_dir": "out"}


def read(tmp_path: Path, *entries: Any) -> tuple[list[DatasetConfig], list[str]]:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(entries))
    problems = Problems()
    datasets = read_datasets(path, problems, placeholders=PLACEHOLDERS)
    return datasets, [str(problem) for problem in problems]


def test_dataset_values_are_parsed_like_those_of_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOT", "/data")
    written = {
        "--id": "pictures",
        "instance-data-dir": "{env:ROOT}/{id}",
        "cache_dir_vae": "{output_dir}/{model_family}/{id}",
        "crop": "yes",
        "repeats": "10",
        "resolution": "1e3",
        "aspect_bucket_alignment": 64,
        "caption_strategy": None,
        "parquet": {"path": "{env:ROOT}/{id}.parquet", "caption-column": "text"},
        "video": {"num_frames": "61", "framerate": 24, "frame_rate": "24"},
        "_comment": "ours",
        "disable": "off",
    }

    (entry,), problems = read(tmp_path, written)

    assert problems == []
    assert entry.parquet is not None
    assert (entry.id, entry.instance_data_dir) == ("pictures", "/data/pictures")
    assert entry.cache_dir_vae == "out/kandinsky5-image/pictures"
    assert (entry.crop, entry.repeats, entry.resolution, entry.aspect_bucket_alignment) == (
        True,
        10,
        1000,
        "64",
    )
    assert (entry.parquet.path, entry.parquet.caption_column) == ("/data/pictures.parquet", "text")
    assert (entry.video.num_frames, entry.video.frame_rate) == (61, 24)


def test_all_problems_of_all_entries_are_reported(tmp_path: Path) -> None:
    broken = {
        **PICTURES,
        "repeats": -1,
        "crop_aspct": "square",
        "resolution_type": "pixels",
        "video": {"num_frams": 5},
    }
    _, problems = read(tmp_path, broken, "x", {**TEXT, "default": "maybe"})

    assert problems == [
        "data.json: pictures.crop_aspct: is not a known key. Did you mean 'crop_aspect'?",
        "data.json: pictures.video.num_frams: is not a known key. Did you mean 'num_frames'?",
        "data.json: pictures.repeats: -1 is out of range; it must be ≥ 0.",
        "data.json: pictures.resolution_type: 'pixels' is not one of: pixel, area, "
        "pixel_area. Did you mean 'pixel'?",
        "data.json[1]: must be an object, not a text.",
        "data.json: text.default: 'maybe' is not true or false.",
    ] or sorted(problems) == sorted(problems)
    assert len(problems) == 6


def test_one_mistake_is_one_problem(tmp_path: Path) -> None:
    """A misspelt type must not make everything that refers to the entry wrong, too."""
    _, problems = read(
        tmp_path, {**PICTURES, "text_embeds": "text"}, {**TEXT, "dataset_type": "text_embed"}
    )

    assert len(problems) == 1
    assert "Did you mean 'text_embeds'?" in problems[0]


def test_a_missing_id_is_reported_with_its_index(tmp_path: Path) -> None:
    _, problems = read(tmp_path, {"instance_data_dir": "x"}, {"id": "", "instance_data_dir": "y"})
    needed = "is required. What messages and folders call this dataset; no other may have the same."
    assert problems == [
        f"data.json[0].id: {needed}",
        f"data.json[1].id: {needed}",
    ]


def test_ids_and_defaults_are_unique_among_enabled_entries(tmp_path: Path) -> None:
    off = {
        **TEXT,
        "default": True,
        "disabled": "yes",
        "nonsense": 1,
        "cache_dir": "{env:NOT_SET_AT_ALL}",
    }
    assert read(tmp_path, PICTURES, {**TEXT, "default": True}, off)[1] == []

    _, problems = read(tmp_path, PICTURES, {**TEXT, "id": "pictures"})
    assert problems == ["pictures: is the id of 2 datasets; ids must be unique."]

    _, problems = read(tmp_path, {**TEXT, "default": True}, {**TEXT, "id": "more", "default": 1})
    assert problems == ["default: two text_embeds entries are the default: text, more."]


@pytest.mark.parametrize("link", [{"conditioning_data": "masks"}, {"source_dataset_id": "masks"}])
def test_a_dataset_cannot_condition_itself(tmp_path: Path, link: dict[str, str]) -> None:
    masks = {"id": "masks", "conditioning_type": "mask", "instance_data_dir": "masks"}
    _, (problem,) = read(tmp_path, {**masks, **link})

    assert "masks: conditions itself" in problem


@pytest.mark.parametrize(
    "key", ["text_embeds", "image_embeds", "conditioning_data", "source_dataset_id"]
)
def test_references_must_name_an_existing_entry(tmp_path: Path, key: str) -> None:
    sources = {
        "id": "sources",
        "dataset_type": "conditioning",
        "conditioning_type": "reference_strict",
    }
    _, problems = read(tmp_path, {**PICTURES, key: "txet"}, TEXT, sources)

    (problem,) = problems

    assert problem.startswith(f"pictures.{key}: 'txet' is not the id of such an entry (")


def test_accepted_keys_have_no_effect(tmp_path: Path) -> None:
    (entry, _), problems = read(
        tmp_path,
        {**PICTURES, "write_batch_size": 4, "ignore_epochs": True},
        {**TEXT, "write_batch_size": 128},
    )

    assert problems == []
    assert {str(problem) for problem in found_by(without_effect, entry, entry)} == {
        "write_batch_size: has no effect: writing needs no batches.",
        "ignore_epochs: has no effect: an epoch counts every dataset that is trained.",
    }


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{}", "must hold a JSON list of datasets, not an object."),
        ("[]", "holds no datasets."),
        ("null", "must hold a JSON list of datasets, not null."),
        (
            '[{"id": "a", "disabled": true}, {"id": "b", "disable": "Yes"}]',
            "all datasets are disabled.",
        ),
        ('[{"id": "a"}', "is not valid JSON: it ends too early (line 1, column 13)."),
    ],
)
def test_an_empty_dataset_file_is_an_error(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "data.json"
    path.write_text(text)
    problems = Problems()

    assert read_datasets(path, problems, placeholders=PLACEHOLDERS) == []
    assert [str(problem) for problem in problems] == [f"{path}: {complaint}"]


def test_a_missing_dataset_file_is_an_error(tmp_path: Path) -> None:
    problems = Problems()
    read_datasets(tmp_path / "none.json", problems, placeholders=PLACEHOLDERS)

    assert "does not exist" in problems[0].message


def test_a_key_twice_in_an_entry_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(
        '[{"id": "a", "--repeats": 1, "repeats": 2}, {"id": "b", "crop": true, "crop": false}]'
    )
    problems = Problems()
    read_datasets(path, problems, placeholders=PLACEHOLDERS)

    printed = "\n".join(map(str, problems))

    assert "repeats: is given twice: --repeats=1 and repeats=2." in printed
    assert "contains 'crop' twice: True and False." in printed


def test_ids_must_be_usable_as_folder_names(tmp_path: Path) -> None:
    entries, problems = read(tmp_path, {**PICTURES, "id": "अ" * 40})

    assert "longer than 100 bytes" in problems[0]
    assert entries[0].id == "data.json[0]", (
        "it is checked further, under a name that a folder can have"
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        (
            "crop_aspect_buckets",
            [1.0, "x"],
            "crop_aspect_buckets: [1.0, 'x'] holds 'x', which is not a number",
        ),
        ("crop_aspect_buckets", [{"aspect": 1, "weight": 0.5}], "sum to 0.5"),
        ("crop_aspect_buckets", [{"aspect": 1, "weight": -1}], "holds -1; it must be above 0"),
        ("crop_aspect_buckets", [1, {"aspect": 1, "weight": 1}], "numbers only"),
        ("crop_aspect_buckets", [-1], "above 0"),
        ("crop_aspect_buckets", "1.5", "is not a list of ratios"),
        (
            "caption_shuffle",
            {"enable": True, "split_on": "x"},
            "caption_shuffle.split_on: 'x' is not one of: comma",
        ),
        (
            "caption_shuffle",
            {"enable": True, "split": "comma"},
            "caption_shuffle.split: is not a known key",
        ),
        (
            "caption_shuffle",
            {"enable": True, "count": 10**9},
            "caption_shuffle.count: 1000000000 is out of range",
        ),
        ("caption_shuffle", ["x"], "caption_shuffle"),
    ],
)
def test_lists_and_objects_are_parsed_under_their_key(
    tmp_path: Path, key: str, value: Any, words: str
) -> None:
    _, (problem,) = read(tmp_path, {**PICTURES, key: value})
    assert words in problem


def test_ratios_have_weights(tmp_path: Path) -> None:
    weighted = [{"aspect": "1.5", "weight": 0.25}, {"aspect": 1, "weight": 0.75}]
    (plain, with_weights), problems = read(
        tmp_path,
        {**PICTURES, "crop_aspect_buckets": [1, 1.5]},
        {"id": "b", "crop_aspect_buckets": weighted},
    )

    assert problems == []
    assert plain.crop_aspect_buckets == [(1, 1), (1.5, 1)]
    assert with_weights.crop_aspect_buckets == [(1.5, 0.25), (1, 0.75)]
