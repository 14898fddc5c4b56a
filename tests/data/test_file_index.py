"""The index of a folder saves work and changes nothing: whatever happens to the files, the datasets
are the same.
"""

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


def let_the_clock_move_on(folder: Path) -> None:
    """Until files bear another time than those that are there, on a file system of any
    granularity.
    """
    probe = folder / "probe"
    probe.touch()
    before = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == before:
        probe.touch()


def paint(path: Path, number: int) -> None:
    """A picture of one colour and one of three sizes, and its caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", [(90, 60), (64, 64), (60, 90)][number % 3], (number, 7, 9)).save(path)
    path.with_suffix(".txt").write_text(f"number {number:04}\nanother")


def build(context: DataContext, root: Path, **more: Any) -> Dataset:
    entry = {"id": "photos", "instance_data_dir": str(root), "caption_strategy": "textfile", **more}
    (dataset,) = build_datasets([DatasetConfig(**entry)], context, Problems())
    return dataset


def some(root: Path, chance: random.Random, suffix: str = ".png") -> Path:
    return chance.choice(sorted(root.rglob(f"*{suffix}")))


def add(root: Path, chance: random.Random) -> None:
    paint(
        root / f"sub {chance.randrange(4)}" / f"new {chance.randrange(1000)}.png",
        chance.randrange(256),
    )


def remove(root: Path, chance: random.Random) -> None:
    some(root, chance, chance.choice([".png", ".txt"])).unlink()


def edit_picture(root: Path, chance: random.Random) -> None:
    Image.new("RGB", (64 + chance.randrange(9), 64), (chance.randrange(256),) * 3).save(
        some(root, chance)
    )


def edit_caption(root: Path, chance: random.Random) -> None:
    some(root, chance, ".txt").write_text(f"edited {chance.randrange(10**6):06}")


def edit_in_secret(root: Path, chance: random.Random) -> None:
    """The same size, and the time of modification restored."""
    path = some(root, chance, ".txt")
    times = path.stat()
    path.write_text("".join(chance.sample(path.read_text(), times.st_size)))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def touch(root: Path, chance: random.Random) -> None:
    some(root, chance, chance.choice([".png", ".txt"])).touch()


def rename(root: Path, chance: random.Random) -> None:
    path = some(root, chance)
    target = path.with_name(f"renamed {chance.randrange(1000)}.png")
    path.rename(target)
    if path.with_suffix(".txt").exists() and chance.random() < 0.7:
        path.with_suffix(".txt").rename(target.with_suffix(".txt"))


def swap_captions(root: Path, chance: random.Random) -> None:
    """Two files of one size and one time of modification, as unpacked archives have them."""
    one, other = (some(root, chance, ".txt") for _ in range(2))
    for path in (one, other):
        path.write_text(f"swapped {chance.randrange(10**6):06}")
        os.utime(path, ns=(1, 1))
    between = one.with_suffix(".moved")
    one.rename(between)
    if other != one:
        other.rename(one)
    between.rename(other)


def damage(root: Path, chance: random.Random) -> None:
    some(root, chance).write_bytes(b"no picture")


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
def test_the_datasets_are_those_of_a_first_start(
    seed: int, context: DataContext, photos: Path, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    for number in range(12):
        more = {"disable_multiline_split": chance.random() < 0.2}
        fresh = replace(context, latent_root=tmp_path / f"fresh {number}")
        expected = build(fresh, photos, **more)
        found = build(context, photos, **more)
        assert found.samples == expected.samples
        assert sorted(map(str, expected.rejected)) == sorted(
            str(file) for file in found.rejected if file.reason != "gone"
        )
        if chance.random() < 0.8:
            found.save_index()
        let_the_clock_move_on(tmp_path)
        for change in chance.sample(CHANGES, chance.randrange(4)):
            change(photos, chance)


def test_what_is_unchanged_is_not_read(
    context: DataContext, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(context, photos).save_index()
    let_the_clock_move_on(tmp_path)
    edit_caption(photos, random.Random(0))
    build(context, photos).save_index()
    read: list[Path] = []
    monkeypatch.setattr(captions, "read_caption_file", lambda path, whole: read.append(path))
    monkeypatch.setattr(file_index, "_inspect", read.append)
    again = build(context, photos)
    index = again.latent_dir / INDEX_NAME
    before = index.stat()
    again.save_index()
    assert (read, len(again.samples)) == ([], 8)
    assert index.stat() == before, "nor is it written"


def test_a_file_of_this_moment_is_read_again(
    context: DataContext, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later change may bear the same time on a coarse clock."""
    monkeypatch.setattr(captions, "COARSEST_CLOCK", 60.0)
    dataset = build(context, photos)
    dataset.save_index()
    assert [fact.stamp for fact in load_index(dataset.latent_dir, photos).values()] == [None] * 8


def test_a_file_that_is_forgotten_is_read_again(context: DataContext, photos: Path) -> None:
    """Even if the index on the disk was written since, by the same start."""
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
    assert content.count(b"\n") == 3
    for end in (0, 1, content.index(b"\n") + 1, len(content) // 2, len(content) - 2):
        index.write_bytes(content[:end])
        again = build(context, photos)
        assert again.samples == dataset.samples
        again.save_index()
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
