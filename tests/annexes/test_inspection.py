"""`cache verify`, `gc` and `explain` on folders with known faults."""

from __future__ import annotations

import dataclasses
import itertools
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from simpletuner.annexes.inspection import (
    VERIFYING_NAME,
    Verification,
    compare,
    explain_miss,
    find_garbage,
    forget_verifications,
    origin_of,
    remove_garbage,
)
from simpletuner.caching.entry import entry_path, list_keys
from simpletuner.caching.keys import EncoderIdentity, FeatureKey, LatentKey, TextKey, provenance_of
from simpletuner.encoding.read import CacheStore

FAMILY = "kandinsky5-image"
ENCODER = EncoderIdentity(FAMILY, "c" * 64, "bf16")
SMALL = LatentKey("a" * 64, (64, 64), (80, 64), (8, 0), ENCODER)
LARGE = dataclasses.replace(
    SMALL, size=(128, 128), encoder=dataclasses.replace(ENCODER, dtype="fp32")
)
OTHER = dataclasses.replace(SMALL, content="b" * 64)
TEXT = TextKey("a star", "official", 256, ENCODER)


@pytest.fixture
def store(tmp_path: Path) -> CacheStore:
    cache = CacheStore(tmp_path)
    for key, source in (
        (SMALL, "set/a.png"),
        (LARGE, "set/a.png"),
        (OTHER, "set/b.png"),
        (TEXT, "set/a.png"),
    ):
        cache.write(key.digest(), {"x": torch.randn(100)}, provenance_of(key, source))
    return cache


def file_of(store: CacheStore, key: LatentKey | TextKey) -> Path:
    (path,) = store.folder.rglob(f"{key.digest()}*")
    return path


def verify(folder: Path, stop_after: int | None = None) -> tuple[Verification, int]:
    """Verify a folder, or a number of its entries; returns how many were read, too."""
    verification = Verification.of(folder)
    count = itertools.count(1)

    def advance() -> None:
        if next(count) == stop_after:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        verification.read(folder, verification.remaining(folder), advance)
    return verification, next(count) - 1


def test_verify_lists_only_damaged_entries(store: CacheStore) -> None:
    assert verify(store.folder)[0].damaged == {}

    forget_verifications([store.folder])
    path = file_of(store, LARGE)
    path.write_bytes(path.read_bytes()[:-5])
    ((key, reason),) = verify(store.folder)[0].damaged.items()
    assert key == LARGE.digest()
    assert str(path) in reason


def test_interrupted_verify_continues_where_it_stopped(store: CacheStore) -> None:
    _, second, *_ = sorted(key.digest() for key in (SMALL, LARGE, OTHER, TEXT))
    good = entry_path(store.folder, second).read_bytes()
    entry_path(store.folder, second).write_bytes(b"")

    stopped, count = verify(store.folder, stop_after=2)
    assert (count, stopped.last, [*stopped.damaged]) == (2, second, [second])
    assert Verification.of(store.folder) == stopped

    entry_path(store.folder, second).write_bytes(good)
    ended, count = verify(store.folder)
    assert (count, ended.damaged) == (3, {}), "the damaged one is read again"
    assert verify(store.folder)[1] == 0, "other folders may not have been read yet"

    forget_verifications([store.folder, store.folder / "without a record"])
    assert verify(store.folder)[1] == 4, "the next one begins anew"


@pytest.mark.parametrize("content", ["", "{", '{"damaged": 1, "last": 2}', "[]"])
def test_damaged_verify_record_is_ignored(store: CacheStore, content: str) -> None:
    (store.folder / VERIFYING_NAME).write_text(content)
    assert verify(store.folder)[1] == 4


def test_gc_lists_first_and_removes_only_what_it_listed(store: CacheStore) -> None:
    used_keys = {SMALL.digest(), TEXT.digest()}
    garbage = find_garbage(store.folder, used_keys, FAMILY)
    assert garbage.entries == {LARGE.digest(): "set/a.png", OTHER.digest(): "set/b.png"}
    assert not find_garbage(store.folder, used_keys, "sanavideo").entries, (
        "entries of other families are left alone"
    )
    assert len(list(list_keys(store.folder))) == 4

    later = dataclasses.replace(OTHER, frames=5)
    store.write(later.digest(), {"x": torch.zeros(1)}, {})
    remove_garbage(store.folder, garbage)
    assert set(list_keys(store.folder)) == used_keys | {later.digest()}
    assert not find_garbage(store.folder, {*used_keys, later.digest()}, FAMILY).entries


def test_gc_assigns_features_to_the_family_of_their_latents(store: CacheStore) -> None:
    feature = FeatureKey("dino", SMALL.digest(), (("size", 1),))
    store.write(feature.digest(), {"x": torch.zeros(1)}, provenance_of(feature, "set/a.png"))
    assert not find_garbage(store.folder, [], "sanavideo").entries
    assert feature.digest() in find_garbage(store.folder, [], FAMILY).entries

    entry_path(store.folder, SMALL.digest()).unlink()
    # Without its latents the family is unknown, so every family lists it.
    assert set(find_garbage(store.folder, [], "sanavideo").entries) == {feature.digest()}


def test_gc_removes_old_leftovers_and_spares_files_being_written(store: CacheStore) -> None:
    folder = file_of(store, SMALL).parent
    old = folder / f".{OTHER.digest()}.safetensors.zst.0a.tmp"
    old.write_bytes(b"half")
    os.utime(old, (0, 0))
    being_written = folder / f".{OTHER.digest()}.safetensors.zst.0b.tmp"
    being_written.write_bytes(b"half")

    keys = set(list_keys(store.folder))
    assert len(keys) == 4, "leftovers are not entries"

    garbage = find_garbage(store.folder, keys, FAMILY)
    assert garbage.leftovers == [old]

    remove_garbage(store.folder, garbage)
    assert being_written.exists()
    assert not old.exists()


def test_foreign_files_in_a_cache_folder_are_left_alone(store: CacheStore) -> None:
    """Someone's model, notes and editor files, also where entries lie."""
    folder_of_entries = file_of(store, SMALL).parent
    foreign = [
        store.folder / "README",
        store.folder / "cd",
        store.folder / "ab" / "model.safetensors",
        store.folder / "mine" / ".draft.safetensors.tmp",
        folder_of_entries / "model.safetensors.zst",
        folder_of_entries / ".notes.tmp",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
        os.utime(path, (0, 0))
    assert len(list(list_keys(store.folder))) == 4
    assert verify(store.folder)[1] == 4

    garbage = find_garbage(store.folder, [], FAMILY)
    assert len(garbage.entries) == 4
    assert not garbage.leftovers

    remove_garbage(store.folder, garbage)
    assert all(path.exists() for path in foreign)


def test_cache_entry_stores_its_source_and_ingredients(store: CacheStore) -> None:
    provenance, ingredients = origin_of(store.folder, SMALL.digest())

    assert provenance == {"source": "set/a.png"}
    assert ingredients["size"] == [64, 64]
    assert ingredients["encoder.family"] == FAMILY
    assert origin_of(store.folder, "0" * 64) == ({}, {})


def test_explain_miss_names_the_ingredient_that_changed(store: CacheStore) -> None:
    missed_key = dataclasses.replace(SMALL, crop=(0, 0))

    differences = explain_miss(store.folder, missed_key, "set/a.png")

    assert list(differences) == [SMALL.digest(), LARGE.digest()]  # nearest first, and no text
    assert differences[SMALL.digest()] == ["crop: cached [8, 0], wanted [0, 0]"]
    assert {text.partition(":")[0] for text in differences[LARGE.digest()]} == {
        "crop",
        "size",
        "encoder.dtype",
    }
    assert explain_miss(store.folder, missed_key, "set/new.png") == {}


def test_compare_counts_ingredients_of_other_versions() -> None:
    assert compare({"a": 1, "b": 2}, {"a": 1, "c": None, "b": 3}) == ["b: cached 2, wanted 3"]
    assert compare({"a": 1}, {"a": 1}) == []
