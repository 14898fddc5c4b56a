"""One cache entry as bytes, and where it lies. No torch here.

An entry is a safetensors file, optionally inside one zstd frame, that any tool can open. Its metadata holds the
provenance, the entry's own key and a checksum over everything else, so that bit rot, a cut file and a file under
another's name are noticed on reading.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from simpletuner.caching.keys import canonical_json
from simpletuner.errors import SimpleTunerError
from simpletuner.headers import METADATA, header_end, join_header, split_header

PLAIN = ".safetensors"
COMPRESSED = ".safetensors.zst"
ZSTD_LEVEL = 3
# What is read at first for the header alone, and the longest header that is believed.
HEAD_BYTES = 1 << 14

# What parsing arbitrary bytes can raise. Running out of memory is not among it: that is no fault of the file.
UNREADABLE = (zstandard.ZstdError, ValueError, LookupError, TypeError, AttributeError)

KEY, CHECKSUM = "key", "checksum"


class DamagedEntryError(SimpleTunerError):
    """An entry is there but is not what was written; it must be made anew."""


@dataclass(frozen=True)
class Entry:
    """A verified entry.

    Attributes:
        blob: the safetensors file, uncompressed.
        provenance: what `provenance_of` wrote.
    """

    blob: bytes
    provenance: dict[str, str]


def entry_path(folder: Path, key: str, *, compressed: bool) -> Path:
    """Where an entry lies: in one of 256 folders by its first two digits, so that none grows large."""
    return folder / key[:2] / (key + (COMPRESSED if compressed else PLAIN))


def find_entry(folder: Path, key: str) -> Path | None:
    """The file of an entry in either form, or None."""
    for compressed in (True, False):
        path = entry_path(folder, key, compressed=compressed)
        if path.is_file():
            return path
    return None


def list_keys(folder: Path) -> Iterator[str]:
    """The keys of all entries, sorted, without opening a file. A folder that is not there has none."""
    for fan in sorted(folder.glob("[0-9a-f][0-9a-f]")):
        yield from sorted(
            {path.name.split(".")[0] for path in fan.iterdir() if path.name.endswith((PLAIN, COMPRESSED))}
        )


def seal(blob: bytes, key: str, provenance: dict[str, str]) -> bytes:
    """A safetensors file with key, provenance and checksum in its metadata."""
    start, header = split_header(blob)
    header[METADATA] = {**provenance, KEY: key}
    data = memoryview(blob)[start:]
    header[METADATA][CHECKSUM] = _checksum(header, data)
    return join_header(header, data)


def compress(blob: bytes) -> bytes:
    """One zstd frame that knows its content's size."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(blob)


def read_entry(path: Path, key: str) -> Entry:
    """Read and verify one entry.

    Raises:
        DamagedEntryError: it is not what was written under this key.
        FileNotFoundError: it is gone.
    """
    blob = path.read_bytes()
    try:
        if path.name.endswith(COMPRESSED):
            # Not decompress(): it believes the size that a damaged frame claims and allocates it.
            blob = zstandard.ZstdDecompressor().decompressobj().decompress(blob)
        start, header = split_header(blob)
        provenance = header[METADATA]
        checksum = provenance.pop(CHECKSUM)
        sound = checksum == _checksum(header, memoryview(blob)[start:]) and provenance.pop(KEY) == key
    except UNREADABLE as error:
        raise DamagedEntryError(f"{path}: damaged cache entry ({error})") from error
    if not sound:
        raise DamagedEntryError(f"{path}: damaged cache entry (the checksum does not fit)")
    return Entry(blob, provenance)


def read_provenance(path: Path) -> dict[str, str]:
    """The provenance in an entry's header, which alone is read; nothing is verified.

    Raises:
        DamagedEntryError: there is no readable header.
    """
    try:
        with path.open("rb") as file:
            source = zstandard.ZstdDecompressor().stream_reader(file) if path.name.endswith(COMPRESSED) else file
            head = source.read(HEAD_BYTES)
            head += source.read(max(header_end(head) - len(head), 0))
        metadata = split_header(head)[1][METADATA]
        return {name: text for name, text in metadata.items() if name not in (KEY, CHECKSUM)}
    except UNREADABLE as error:
        raise DamagedEntryError(f"{path}: damaged cache entry ({error})") from error


def _checksum(header: dict[str, Any], data: memoryview) -> str:
    """CRC-32 of the header (without the checksum) and the data: quick, and sure against accidents."""
    return f"{zlib.crc32(data, zlib.crc32(canonical_json(header).encode())):08x}"
