"""The file format and path of one cache entry.

An entry is a safetensors file inside one zstd frame, which standard tools can unpack. Its metadata
holds the provenance, the entry's key and a checksum over everything else, so that reading detects
bit rot, truncation and renamed files.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import zstandard

from simpletuner.atomic import write_atomically
from simpletuner.errors import SimpleTunerError
from simpletuner.hashing import canonical_json
from simpletuner.headers import METADATA, join_header, read_head

ENTRY_SUFFIX = ".safetensors.zst"
ENTRY_NAME = re.compile(rf"([0-9a-f]{{64}}){re.escape(ENTRY_SUFFIX)}")
# Lower levels are faster; at STORED_LEVEL, zstd stores blocks uncompressed.
ZSTD_LEVEL = 3
STORED_LEVEL = -10_000
# Bytes; far above real entries: ten seconds at 1280x768 take 60 MB.
LARGEST_ENTRY = 1 << 30

# Errors from parsing arbitrary bytes. Not MemoryError, since the file may be intact.
UNREADABLE = (zstandard.ZstdError, ValueError, LookupError, TypeError, AttributeError)

KEY = "key"
CHECKSUM = "checksum"


class DamagedEntryError(SimpleTunerError):
    """An entry exists but differs from what was written; it must be encoded again."""


def entry_path(folder: Path, key: str) -> Path:
    """The path of an entry, below the first two digits of its key."""
    # 256 subfolders, since file systems and programs are slow in folders of many files.
    return folder / key[:2] / (key + ENTRY_SUFFIX)


def list_keys(folder: Path) -> Iterator[str]:
    """The keys of all entries, sorted, without opening a file; other files are skipped.

    A missing folder has none.
    """
    for subfolder in sorted(folder.glob("[0-9a-f][0-9a-f]/")):
        keys = []
        for name in os.listdir(subfolder):  # noqa: PTH208 - iterdir takes far longer
            match = ENTRY_NAME.fullmatch(name)
            # `entry_path` would not find an entry in the wrong subfolder.
            if match is not None and match[1].startswith(subfolder.name):
                keys.append(match[1])
        yield from sorted(keys)


def store_entry(
    folder: Path, key: str, blob: bytes, provenance: dict[str, str], *, compress: bool
) -> None:
    """Write a safetensors file as an entry, with key, provenance and checksum in its metadata.

    The entry is one zstd frame with its content size in the header, and with uncompressed blocks
    unless `compress` is set. Entries are not fsynced: an entry torn by a power cut fails its
    checksum and is encoded again.

    Raises:
        DiskFullError: no space left; no partial entry remains, and an existing entry is kept.
    """
    head, header = read_head(BytesIO(blob))
    header[METADATA] = {**provenance, KEY: key}
    data = memoryview(blob)[len(head) :]
    header[METADATA][CHECKSUM] = _checksum(header, data)
    # A frame in both cases, so that readers need not distinguish them.
    packer = zstandard.ZstdCompressor(level=ZSTD_LEVEL if compress else STORED_LEVEL)
    content = packer.compress(join_header(header, data))
    write_atomically(entry_path(folder, key), content, durable=False)


def _damaged(path: Path, error: Exception) -> DamagedEntryError:
    if isinstance(error, IsADirectoryError):
        return DamagedEntryError(f"{path}: is a folder where a cache entry belongs; move it away")
    return DamagedEntryError(f"{path}: damaged cache entry ({error})")


def read_entry(folder: Path, key: str) -> bytes:
    """Read and verify one entry: the safetensors file, uncompressed.

    Raises:
        DamagedEntryError: the content differs from what was written under this key.
        FileNotFoundError: the entry does not exist.
    """
    path = entry_path(folder, key)
    try:
        source = zstandard.ZstdDecompressor().stream_reader(path.read_bytes())
        head, header = read_head(source)
        # Check first: a frame of a few kilobytes can decompress to gigabytes.
        tensors = [entry for name, entry in header.items() if name != METADATA]
        end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        if end > LARGEST_ENTRY:
            raise ValueError(f"it claims {end:,} bytes")
        data = source.read(end + 1)  # one extra byte, so that trailing data fails the checksum
        provenance = header[METADATA]
        checksum = provenance.pop(CHECKSUM)
        sound = checksum == _checksum(header, data) and provenance.pop(KEY) == key
    except (IsADirectoryError, *UNREADABLE) as error:
        raise _damaged(path, error) from error
    if not sound:
        raise DamagedEntryError(f"{path}: damaged cache entry (the checksum does not match)")
    return head + data


def read_provenance(path: Path) -> dict[str, str]:
    """The provenance in an entry's header; the data is not read or verified.

    Raises:
        DamagedEntryError: the header is not readable.
        FileNotFoundError: the entry does not exist.
    """
    try:
        with path.open("rb") as file:
            _, header = read_head(zstandard.ZstdDecompressor().stream_reader(file))
        metadata = header[METADATA]
        return {name: text for name, text in metadata.items() if name not in (KEY, CHECKSUM)}
    except (IsADirectoryError, *UNREADABLE) as error:
        raise _damaged(path, error) from error


def _checksum(header: dict[str, Any], data: bytes | memoryview) -> str:
    """CRC-32 of the header (without the checksum) and the data, as 8 hexadecimal digits."""
    # Fast, and enough against accidental damage; nobody forges a cache.
    crc = zlib.crc32(canonical_json(header).encode())
    crc = zlib.crc32(data, crc)
    return f"{crc:08x}"
