"""Headers of safetensors files: eight bytes of length, then JSON, then the data of all tensors.

The safetensors library writes metadata in an order that varies between processes. Where equal
content must give equal bytes, this module rewrites the header with sorted keys.
"""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

METADATA = "__metadata__"
LENGTH_BYTES = 8
# Bytes. Real headers take up to a few megabytes; with a larger claim, the file is not safetensors.
LONGEST_HEADER = 100_000_000


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file, without its data.

    Raises:
        ValueError: not a safetensors file.
    """
    with path.open("rb") as file:
        return read_head(file)[1]


def read_head(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """The bytes before the tensor data, and the parsed header, always with metadata.

    Leaves the position of the file at the data. Tensors are not checked: the library does that for
    a user's weights, see `models.source.weights_header`.

    Raises:
        ValueError: the header is not readable.
    """
    length = file.read(LENGTH_BYTES)
    size = int.from_bytes(length, "little")
    if size > LONGEST_HEADER:
        raise ValueError("it has no header")
    text = file.read(size)
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header[METADATA] = header.get(METADATA) or {}  # the library accepts null
    return length + text, header


def join_header(header: dict[str, Any], data: bytes | memoryview) -> bytes:
    """The bytes of a file with this header, with sorted keys, and this data."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    return b"".join((len(text).to_bytes(LENGTH_BYTES, "little"), text, data))


def with_metadata(blob: bytes, metadata: dict[str, str]) -> bytes:
    """A safetensors file with its metadata replaced."""
    head, header = read_head(BytesIO(blob))
    header[METADATA] = metadata
    return join_header(header, memoryview(blob)[len(head) :])
