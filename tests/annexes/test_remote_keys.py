"""Entries of remote datasets as they are written in the dataset file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simpletuner.config.datasets import PATH_KEYS, DatasetConfig, read_datasets
from simpletuner.config.remote import SOURCES, RemoteKeys, Source
from simpletuner.data.entries import DataContext
from simpletuner.errors import Problem, Problems

HUB = {"id": "hub", "type": "huggingface", "dataset_name": "owner/set"}


def read(folder: Path, entry: dict[str, Any]) -> tuple[Any, list[Problem]]:
    path = folder / "datasets.json"
    path.write_text(json.dumps([entry]))
    problems = Problems()
    (config,) = read_datasets(
        path, problems, placeholders={"model_family": "f", "output_dir": "out"}
    )
    return config, problems


def test_keys_of_the_hub_may_stand_inside_an_object(tmp_path: Path) -> None:
    inner = {
        "dataset_name": "owner/set",
        "caption_column": "a,b",
        "filter_func": {"min_width": "64"},
    }

    config, problems = read(tmp_path, {"id": "hub", "type": "huggingface", "huggingface": inner})

    assert problems == []
    assert (config.dataset_name, config.caption_column) == ("owner/set", ["a", "b"])
    assert config.filter_func.min_width == 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"type": "webshart"}, "'webshart' does not exist here: unpack the shards"),
        ({"dataset_type": "audio"}, "'audio' does not exist here: the models here have no sound"),
        ({"enable_nsfw_check": True}, "is not a key here: no file is judged by its content"),
        ({"vae_cache_ondemand": True}, "is a key of config.json"),
        ({"datset_name": "b"}, "Did you mean 'dataset_name'?"),
    ],
)
def test_keys_of_other_trainers_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    _, problems = read(tmp_path, {**HUB, **change})

    (fatal,) = [problem for problem in problems if problem.fatal]
    assert words in fatal.message


def test_every_remote_key_belongs_to_a_source() -> None:
    keys_of_sources = {key for source in SOURCES.values() for key in source.keys.model_fields}
    assert keys_of_sources == RemoteKeys.model_fields.keys()


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_required_keys_of_a_source_are_dataset_keys(source: Source) -> None:
    assert {*source.required} <= source.keys.model_fields.keys()
    assert {*source.folders} <= {*PATH_KEYS}


@pytest.mark.parametrize(
    ("keys", "folder"),
    [
        ({"huggingface_cache_dir": "~/first", "cache_dir": "second"}, Path("~/first").expanduser()),
        ({"cache_dir": "second"}, Path("second")),
    ],
)
def test_downloads_go_to_the_first_folder_that_is_named(
    context: DataContext, keys: dict[str, Any], folder: Path
) -> None:
    entry = DatasetConfig(id="hub", type="huggingface", **keys)

    assert context.fill(entry).instance_data_dir == str(folder)


def test_downloads_without_a_folder_go_to_the_cache_of_the_run(context: DataContext) -> None:
    entry = DatasetConfig(id="hub", type="huggingface")

    assert context.fill(entry).instance_data_dir == str(
        context.download_root / "huggingface" / "hub"
    )
