"""Entries come back exactly as they were written, or not at all."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import zstandard
from safetensors import safe_open
from torch import Tensor

from simpletuner import atomic
from simpletuner.annexes.inspection import origin_of
from simpletuner.caching.entry import DamagedEntryError, entry_path, list_keys, read_provenance
from simpletuner.encoding.read import CacheStore
from simpletuner.errors import DiskFullError
from simpletuner.headers import METADATA, join_header


def key(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(16, 1, 12, 9, generator=generator)
    return {
        "latents": normal,
        "bf16": normal.bfloat16(),
        "transposed": normal.transpose(0, 3),
        "shared": normal[2:5],
        "mask": normal > 0,
        "ids": torch.arange(7),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "special": torch.tensor([3.4e38, -0.0, 1e-42]),
        "largest": torch.tensor([65504.0], dtype=torch.float16),
    }


def assert_same_bits(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        bits = (
            found[name].reshape(-1).view(torch.uint8),
            tensor.contiguous().reshape(-1).view(torch.uint8),
        )
        assert torch.equal(*bits), name


@pytest.mark.parametrize("compress", [True, False])
def test_every_dtype_round_trips_bit_for_bit_under_either_setting(
    tmp_path: Path, compress: bool
) -> None:
    CacheStore(tmp_path, compress).write(key(1), tensors(), {"source": "रंग/a.png"})
    for reader in (CacheStore(tmp_path, True), CacheStore(tmp_path, False)):
        assert_same_bits(reader.read(key(1)), tensors())
        assert read_provenance(entry_path(reader.folder, key(1))) == {"source": "रंग/a.png"}
        assert list(list_keys(reader.folder)) == [key(1)]


def test_what_was_read_may_be_changed(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    store.write(key(1), {"x": torch.zeros(3)}, {})
    store.read(key(1))["x"].add_(1)
    assert store.read(key(1))["x"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("compress", [True, False])
def test_an_entry_is_a_safetensors_file_in_a_zstd_frame(tmp_path: Path, compress: bool) -> None:
    CacheStore(tmp_path, compress).write(key(1), tensors(), {"source": "a"})
    frame = (tmp_path / key(1)[:2] / f"{key(1)}.safetensors.zst").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(zstandard.ZstdDecompressor().decompress(frame))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("latents"), tensors()["latents"])
        assert file.metadata()["source"] == "a"


def test_compressing_saves_space(tmp_path: Path) -> None:
    sizes = []
    for compress in (True, False):
        CacheStore(tmp_path, compress).write(
            key(1), {"x": torch.randn(4096).bfloat16().float()}, {}
        )
        (path,) = (tmp_path / key(1)[:2]).iterdir()
        sizes.append(path.stat().st_size)
    assert sizes[0] < 0.7 * sizes[1]


def test_a_missing_entry_is_not_found(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "never made")
    assert list(list_keys(store.folder)) == []
    with pytest.raises(FileNotFoundError):
        store.read(key(1))
    assert origin_of(store.folder, key(1)) == ({}, {})


def damages(content: bytes) -> Iterator[bytes]:
    for cut in range(0, len(content), 7):
        yield content[:cut]
    for position, bit in itertools.product(range(len(content)), (0, 3, 7)):
        yield content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


@pytest.mark.parametrize("compress", [True, False])
def test_no_flipped_bit_and_no_cut_ever_passes(tmp_path: Path, compress: bool) -> None:
    """Either noticed, or of no consequence (a bit in the padding that keeps it a space)."""
    store = CacheStore(tmp_path, compress)
    wanted = {"x": torch.randn(40), "y": torch.arange(3)}
    store.write(key(1), wanted, {"source": "a"})
    (path,) = (tmp_path / key(1)[:2]).iterdir()
    content = path.read_bytes()
    missed = 0
    for damaged in damages(content):
        path.write_bytes(damaged)
        try:
            found = store.read(key(1))
        except DamagedEntryError:
            pass
        else:
            assert_same_bits(found, wanted)
            missed += 1
    assert missed < 20
    store.write(key(1), wanted, {"source": "a"})
    assert_same_bits(store.read(key(1)), wanted)


def test_an_entry_with_more_at_its_end_is_damaged(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    store.write(key(1), tensors(), {})
    (path,) = (tmp_path / key(1)[:2]).iterdir()
    longer = zstandard.ZstdDecompressor().decompress(path.read_bytes()) + bytes(1 << 15)
    path.write_bytes(zstandard.ZstdCompressor().compress(longer))
    with pytest.raises(DamagedEntryError):
        store.read(key(1))


def test_an_entry_under_anothers_name_is_damaged(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    store.write(key(1), tensors(), {})
    (path,) = (tmp_path / key(1)[:2]).iterdir()
    other = tmp_path / key(2)[:2] / path.name.replace(key(1), key(2))
    other.parent.mkdir()
    path.rename(other)
    with pytest.raises(DamagedEntryError):
        store.read(key(2))


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 40, b"\x02" + b"\x00" * 7 + b"[]"])
@pytest.mark.parametrize("compress", [True, False])
def test_rubbish_has_no_provenance(tmp_path: Path, content: bytes, compress: bool) -> None:
    store = CacheStore(tmp_path, compress)
    store.write(key(1), tensors(), {})
    (path,) = (tmp_path / key(1)[:2]).iterdir()
    path.write_bytes(content)
    with pytest.raises(DamagedEntryError):
        read_provenance(entry_path(store.folder, key(1)))
    with pytest.raises(DamagedEntryError):
        store.read(key(1))


def test_a_full_disk_leaves_the_old_entry_and_nothing_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CacheStore(tmp_path)
    store.write(key(1), {"x": torch.zeros(2)}, {})

    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic.Path, "replace", full)
    for name in (1, 2):
        with pytest.raises(DiskFullError, match=key(name)):
            store.write(key(name), {"x": torch.ones(2)}, {})
    assert list(list_keys(store.folder)) == [key(1)]
    assert store.read(key(1))["x"].tolist() == [0, 0]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize("compress", [True, False])
def test_threads_read_and_write_at_once(tmp_path: Path, compress: bool) -> None:
    """Readers of a key that other threads are writing see a whole entry at any moment."""
    keys = [key(n) for n in range(8)]
    wanted = {one: {"x": torch.full((3000,), float(n))} for n, one in enumerate(keys)}
    writers = CacheStore(tmp_path, compress), CacheStore(tmp_path, compress)
    for one in keys:
        writers[0].write(one, wanted[one], {})

    def work(turn: int) -> None:
        one = keys[turn % len(keys)]
        if turn % 3 == 0:
            writers[turn % 2].write(one, wanted[one], {})
        assert_same_bits(writers[turn % 2].read(one), wanted[one])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(600)))
    assert list(list_keys(writers[0].folder)) == sorted(keys)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("claimed", [4 * 10, 1 << 40])
def test_an_entry_unpacks_at_most_to_what_its_header_needs(tmp_path: Path, claimed: int) -> None:
    """A megabyte of zeros takes a few bytes; a header that asks for less or for a terabyte gets
    neither.
    """
    name = key("bomb")
    header = {"x": {"dtype": "F32", "shape": [claimed // 4], "data_offsets": [0, claimed]}}
    entry = tmp_path / name[:2] / f"{name}.safetensors.zst"
    entry.parent.mkdir()
    writer = zstandard.ZstdCompressor().compressobj()
    parts = [writer.compress(join_header({**header, METADATA: {}}, b""))]
    parts += [writer.compress(bytes(1 << 20)) for _ in range(256)] + [writer.flush()]
    entry.write_bytes(b"".join(parts))
    tracemalloc.start()
    with pytest.raises(DamagedEntryError):
        CacheStore(tmp_path).read(name)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
