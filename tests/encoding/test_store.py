"""Entries come back exactly as they were written, or not at all."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(entry: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert entry.keys() == expected.keys()
    for name, tensor in expected.items():
        assert entry[name].dtype == tensor.dtype
        assert entry[name].shape == tensor.shape
        assert torch.equal(bits_of(entry[name]), bits_of(tensor)), name


@pytest.mark.parametrize("compress", [True, False])
def test_every_dtype_round_trips_bit_for_bit_under_either_setting(
    tmp_path: Path, compress: bool
) -> None:
    CacheStore(tmp_path, compress).write(key(1), tensors(), {"source": "रंग/a.png"})

    for reader in (CacheStore(tmp_path, True), CacheStore(tmp_path, False)):
        assert_same_bits(reader.read(key(1)), tensors())
        assert read_provenance(entry_path(reader.folder, key(1))) == {"source": "रंग/a.png"}
        assert list(list_keys(reader.folder)) == [key(1)]


def test_changing_what_was_read_does_not_change_the_entry(tmp_path: Path) -> None:
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


def test_compressed_entries_are_smaller(tmp_path: Path) -> None:
    entry = {"x": torch.randn(4096).bfloat16().float()}

    def size(compress: bool) -> int:
        CacheStore(tmp_path, compress).write(key(1), entry, {})
        (path,) = (tmp_path / key(1)[:2]).iterdir()
        return path.stat().st_size

    assert size(True) < 0.7 * size(False)


def test_a_missing_entry_is_not_found(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "never made")

    assert list(list_keys(store.folder)) == []
    assert origin_of(store.folder, key(1)) == ({}, {})
    with pytest.raises(FileNotFoundError):
        store.read(key(1))


def damages(content: bytes) -> Iterator[bytes]:
    """The content cut at many places, and with many single bits flipped."""
    for cut in range(0, len(content), 7):
        yield content[:cut]
    for position, bit in itertools.product(range(len(content)), (0, 3, 7)):
        yield content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]


@pytest.mark.parametrize("compress", [True, False])
def test_no_flipped_bit_and_no_cut_ever_passes(tmp_path: Path, compress: bool) -> None:
    """It is detected or has no effect, such as a bit in the padding that keeps it a space."""
    store = CacheStore(tmp_path, compress)
    expected = {"x": torch.randn(40), "y": torch.arange(3)}
    store.write(key(1), expected, {"source": "a"})
    (path,) = (tmp_path / key(1)[:2]).iterdir()
    content = path.read_bytes()
    without_effect = 0
    for damaged in damages(content):
        path.write_bytes(damaged)
        with suppress(DamagedEntryError):
            assert_same_bits(store.read(key(1)), expected)
            without_effect += 1

    assert without_effect < 20


def test_a_damaged_entry_is_replaced_by_writing_it(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    store.write(key(1), tensors(), {})
    (path,) = (tmp_path / key(1)[:2]).iterdir()
    path.write_bytes(path.read_bytes()[:-5])

    store.write(key(1), tensors(), {})

    assert_same_bits(store.read(key(1)), tensors())


def test_an_entry_with_further_bytes_at_its_end_is_damaged(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    store.write(key(1), tensors(), {})
    (path,) = (tmp_path / key(1)[:2]).iterdir()
    longer = zstandard.ZstdDecompressor().decompress(path.read_bytes()) + bytes(1 << 15)
    path.write_bytes(zstandard.ZstdCompressor().compress(longer))

    with pytest.raises(DamagedEntryError):
        store.read(key(1))


def test_an_entry_under_the_name_of_another_is_damaged(tmp_path: Path) -> None:
    store = CacheStore(tmp_path)
    store.write(key(1), tensors(), {})
    (path,) = (tmp_path / key(1)[:2]).iterdir()
    renamed = tmp_path / key(2)[:2] / path.name.replace(key(1), key(2))
    renamed.parent.mkdir()
    path.rename(renamed)

    with pytest.raises(DamagedEntryError):
        store.read(key(2))


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 40, b"\x02" + b"\x00" * 7 + b"[]"])
@pytest.mark.parametrize("compress", [True, False])
def test_arbitrary_bytes_are_a_damaged_entry(
    tmp_path: Path, content: bytes, compress: bool
) -> None:
    store = CacheStore(tmp_path, compress)
    store.write(key(1), tensors(), {})
    (path,) = (tmp_path / key(1)[:2]).iterdir()
    path.write_bytes(content)

    with pytest.raises(DamagedEntryError):
        read_provenance(entry_path(store.folder, key(1)))
    with pytest.raises(DamagedEntryError):
        store.read(key(1))


def test_a_full_disk_keeps_the_old_entry_and_leaves_no_part_of_the_new_one(
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
def test_threads_read_complete_entries_while_others_write_them(
    tmp_path: Path, compress: bool
) -> None:
    keys = [key(number) for number in range(8)]
    expected = {name: {"x": torch.full((3000,), float(n))} for n, name in enumerate(keys)}
    stores = [CacheStore(tmp_path, compress), CacheStore(tmp_path, compress)]
    for name in keys:
        stores[0].write(name, expected[name], {})

    def work(turn: int) -> None:
        name = keys[turn % len(keys)]
        store = stores[turn % 2]
        if turn % 3 == 0:
            store.write(name, expected[name], {})
        assert_same_bits(store.read(name), expected[name])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(600)))

    assert list(list_keys(tmp_path)) == sorted(keys)
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("claimed", [4 * 10, 1 << 40])
def test_an_entry_unpacks_at_most_to_what_its_header_needs(tmp_path: Path, claimed: int) -> None:
    """256 MiB of zeros take a few bytes, and the header may claim less than that, or a terabyte."""
    name = key("bomb")
    header = {"x": {"dtype": "F32", "shape": [claimed // 4], "data_offsets": [0, claimed]}}
    compressor = zstandard.ZstdCompressor().compressobj()
    parts = [compressor.compress(join_header({**header, METADATA: {}}, b""))]
    parts += [compressor.compress(bytes(1 << 20)) for _ in range(256)]
    parts.append(compressor.flush())
    entry = tmp_path / name[:2] / f"{name}.safetensors.zst"
    entry.parent.mkdir()
    entry.write_bytes(b"".join(parts))
    tracemalloc.start()

    with pytest.raises(DamagedEntryError):
        CacheStore(tmp_path).read(name)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 10 << 20
