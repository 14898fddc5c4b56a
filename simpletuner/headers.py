"""The header of a safetensors file: eight bytes of length, then JSON, then the data of all tensors.

The safetensors library writes metadata in an order that varies between processes. Where equal content must give equal
bytes, the header is rewritten here with sorted keys. Free of torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

METADATA = "__metadata__"
LENGTH_BYTES = 8
# Real headers take kilobytes to a few megabytes; a larger claim means that the file is not safetensors.
LONGEST_HEADER = 100_000_000


def header_end(head: bytes) -> int:
    """Offset of the tensor data, from the first eight bytes or more.

    Raises:
        ValueError: the claimed length is impossible.
    """
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    if length > LONGEST_HEADER:
        raise ValueError("it has no header")
    return LENGTH_BYTES + length


def split_header(blob: bytes) -> tuple[int, dict[str, Any]]:
    """Offset of the tensor data and the parsed header of a file's bytes.

    Raises:
        ValueError: there is no readable header.
    """
    start = header_end(blob)
    return start, json.loads(blob[LENGTH_BYTES:start])


def join_header(header: dict[str, Any], data: bytes | memoryview) -> bytes:
    """The bytes of a file with this header, keys sorted, and this data."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    return b"".join((len(text).to_bytes(LENGTH_BYTES, "little"), text, data))


def with_metadata(blob: bytes, metadata: dict[str, str]) -> bytes:
    """A safetensors file with its metadata replaced."""
    start, header = split_header(blob)
    header[METADATA] = metadata
    return join_header(header, memoryview(blob)[start:])


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file, without its data.

    Raises:
        ValueError: not a safetensors file.
    """
    with path.open("rb") as file:
        start = header_end(file.read(LENGTH_BYTES))
        header: dict[str, Any] = json.loads(file.read(start - LENGTH_BYTES))
    return header
