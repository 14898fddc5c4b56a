"""The header of a safetensors file: eight bytes of length, then JSON, then the data of all tensors.

The library writes metadata in an order that changes from process to process. Where equal content must give equal
bytes, the header is written again here, with its keys sorted. No torch here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METADATA = "__metadata__"
LENGTH_BYTES = 8
# Real headers have kilobytes to a few megabytes; a larger claim means that the file is not safetensors.
LONGEST_HEADER = 100_000_000


def header_end(head: bytes) -> int:
    """Where the data starts, from the first eight bytes or more.

    Raises:
        ValueError: no header can be this long.
    """
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > LONGEST_HEADER:
        raise ValueError("it has no header")
    return LENGTH_BYTES + length


def split_header(blob: bytes) -> tuple[int, dict[str, Any]]:
    """Where the data of a file's bytes starts, and its header.

    Raises:
        ValueError: there is no readable header.
    """
    start = header_end(blob)
    return start, json.loads(blob[LENGTH_BYTES:start])


def join_header(header: dict[str, Any], data: bytes | memoryview) -> bytes:
    """A file of this header, keys sorted, and data."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format wants the data aligned
    return b"".join((len(text).to_bytes(LENGTH_BYTES, "little"), text, data))


def with_metadata(blob: bytes, metadata: dict[str, str]) -> bytes:
    """A safetensors file with this metadata in place of its own."""
    start, header = split_header(blob)
    header[METADATA] = metadata
    return join_header(header, memoryview(blob)[start:])


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file, without its data.

    Raises:
        ValueError: it is not a safetensors file.
    """
    with path.open("rb") as file:
        start = header_end(file.read(LENGTH_BYTES))
        header: dict[str, Any] = json.loads(file.read(start - LENGTH_BYTES))
    return header
