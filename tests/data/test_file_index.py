"""The index of a folder saves work and changes nothing, whatever happens to the files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from simpletuner.config.datasets import DatasetConfig
from simpletuner.data import captions, file_index
from simpletuner.data.build import build_datasets
from simpletuner.data.dataset import Dataset
from simpletuner.data.entries import DataContext
from simpletuner.data.file_index import INDEX_NAME, load_index
from simpletuner.errors import Problems

Change = Callable[[Path, random.Random], None]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for number in range(8):
        paint(root / f"sub {number % 3}" / f"{number}.png", number)
    return root


@pytest.fixture(autouse=True)
def exact_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this moment are trusted; tests wait for the file system's clock instead."""
    monkeypatch.setattr(captions, "COARSEST_CLOCK", 0.0)


def wait_for_the_clock(folder: Path) -> None:
    """Wait until new files have a later time than present ones, however coarse the clock is."""
    probe = folder / "probe"
    probe.touch()
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        probe.touch()


def paint(path: Path, number: int) -> None:
    """A picture of one colour and one of three sizes, and its caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = [(90, 60), (64, 64), (60, 90)]
    Image.new("RGB", sizes[number % 3], (number, 7, 9)).save(path)
    path.with_suffix(".txt").write_text(f"number {number:04}\nanother")


def build(context: DataContext, root: Path, **keys: Any) -> Dataset:
    entry = {"id": "photos", "instance_data_dir": str(root), "caption_strategy": "textfile"}
    config = DatasetConfig(**{**entry, **keys})
    (dataset,) = build_datasets([config], context, Problems())
    return dataset


def choose_file(root: Path, chance: random.Random, suffix: str = ".png") -> Path:
    return chance.choice(sorted(root.rglob(f"*{suffix}")))


def add(root: Path, chance: random.Random) -> None:
    folder = root / f"sub {chance.randrange(4)}"
    paint(folder / f"new {chance.randrange(1000)}.png", chance.randrange(256))


def remove(root: Path, chance: random.Random) -> None:
    choose_file(root, chance, chance.choice([".png", ".txt"])).unlink()


def edit_picture(root: Path, chance: random.Random) -> None:
    size = (64 + chance.randrange(9), 64)
    level = chance.randrange(256)
    Image.new("RGB", size, (level, level, level)).save(choose_file(root, chance))


def edit_caption(root: Path, chance: random.Random) -> None:
    choose_file(root, chance, ".txt").write_text(f"edited {chance.randrange(10**6):06}")


def edit_in_secret(root: Path, chance: random.Random) -> None:
    """The same size, and the time of modification restored."""
    path = choose_file(root, chance, ".txt")
    times = path.stat()
    path.write_text("".join(chance.sample(path.read_text(), times.st_size)))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def touch(root: Path, chance: random.Random) -> None:
    choose_file(root, chance, chance.choice([".png", ".txt"])).touch()


def rename(root: Path, chance: random.Random) -> None:
    path = choose_file(root, chance)
    target = path.with_name(f"renamed {chance.randrange(1000)}.png")
    path.rename(target)
    if path.with_suffix(".txt").exists() and chance.random() < 0.7:
        path.with_suffix(".txt").rename(target.with_suffix(".txt"))


def swap_captions(root: Path, chance: random.Random) -> None:
    """Two files of one size and one time of modification, as unpacked archives have them."""
    first = choose_file(root, chance, ".txt")
    second = choose_file(root, chance, ".txt")
    for path in (first, second):
        path.write_text(f"swapped {chance.randrange(10**6):06}")
        os.utime(path, ns=(1, 1))
    between = first.with_suffix(".moved")
    first.rename(between)
    if second != first:
        second.rename(first)
    between.rename(second)


def damage(root: Path, chance: random.Random) -> None:
    choose_file(root, chance).write_bytes(b"no picture")


CHANGES: list[Change] = [
    add,
    add,
    remove,
    edit_picture,
    edit_caption,
    edit_in_secret,
    touch,
    rename,
    swap_captions,
    damage,
]


@pytest.mark.parametrize("seed", range(6))
def test_a_build_with_an_index_equals_one_without(
    seed: int, context: DataContext, photos: Path, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    for number in range(12):
        keys = {"disable_multiline_split": chance.random() < 0.2}
        without_index = replace(context, latent_root=tmp_path / f"fresh {number}")

        expected = build(without_index, photos, **keys)
        dataset = build(context, photos, **keys)

        assert dataset.samples == expected.samples
        rejected = [file for file in dataset.rejected if file.reason != "gone"]
        assert sorted(map(str, rejected)) == sorted(map(str, expected.rejected))
        if chance.random() < 0.8:
            dataset.save_index()
        wait_for_the_clock(tmp_path)
        for change in chance.sample(CHANGES, chance.randrange(4)):
            change(photos, chance)


def test_unchanged_files_are_not_read_and_their_index_is_not_written(
    context: DataContext, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(context, photos).save_index()
    wait_for_the_clock(tmp_path)
    edit_caption(photos, random.Random(0))
    build(context, photos).save_index()
    read: list[Path] = []
    monkeypatch.setattr(captions, "read_caption_file", lambda path, whole: read.append(path))
    monkeypatch.setattr(file_index, "_inspect", read.append)

    dataset = build(context, photos)
    index = dataset.latent_dir / INDEX_NAME
    status = index.stat()
    dataset.save_index()

    assert read == []
    assert len(dataset.samples) == 8
    assert index.stat() == status


def test_a_caption_that_is_too_new_for_the_clock_has_no_stamp(
    context: DataContext, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later change may have the same time on a coarse clock."""
    monkeypatch.setattr(captions, "COARSEST_CLOCK", 60.0)
    dataset = build(context, photos)

    dataset.save_index()

    stamps = [facts.stamp for facts in load_index(dataset.latent_dir, photos).values()]
    assert stamps == [None] * 8


def test_a_file_excepted_from_the_index_is_read_again(context: DataContext, photos: Path) -> None:
    """Even if the same start has written the index before."""
    build(context, photos).save_index()
    paint(photos / "late.png", 9)
    dataset = build(context, photos)

    dataset.save_index()
    dataset.save_index(except_for={"late.png"})

    assert "late.png" not in load_index(dataset.latent_dir, photos)


def test_a_torn_index_is_rebuilt(
    context: DataContext, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_index, "PER_LINE", 3)
    dataset = build(context, photos)
    dataset.save_index()
    index = dataset.latent_dir / INDEX_NAME
    content = index.read_bytes()

    assert content.count(b"\n") == 3  # 8 files, 3 to a line

    for end in (0, 1, content.index(b"\n") + 1, len(content) // 2, len(content) - 2):
        index.write_bytes(content[:end])

        rebuilt = build(context, photos)
        rebuilt.save_index()

        assert rebuilt.samples == dataset.samples
        assert index.read_bytes() == content


def test_an_index_of_an_older_version_still_counts(
    context: DataContext, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One document without line breaks, every field written, no stamps."""
    dataset = build(context, photos)
    dataset.save_index()
    index = dataset.latent_dir / INDEX_NAME
    content = json.loads(index.read_text())
    for facts in content["files"].values():
        facts |= {"problem": None, "clip": None, "white": None}
        del facts["stamp"]
    index.write_text(json.dumps(content))
    monkeypatch.setattr(file_index, "_inspect", lambda path: pytest.fail(f"{path} was read"))

    assert build(context, photos).samples == dataset.samples
