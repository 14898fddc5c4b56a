"""Headers of safetensors files: eight bytes of length, then JSON, then the data of all tensors.

The safetensors library writes metadata in an order that varies between processes. Where equal content must give equal
bytes, this module rewrites the header with sorted keys. Imports no torch.
"""

from __future__ import annotations

import json
import math
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

METADATA = "__metadata__"
LENGTH_BYTES = 8
# Bytes. Real headers take up to a few megabytes; with a larger claim, the file is not safetensors.
LONGEST_HEADER = 100_000_000
# Bits per number, by the format's dtype names.
BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
# Unsigned integers as wide as a weight dtype, and the bits that are all set in NaN and infinity only: the exponent, and
# in F8_E4M3, which has no infinity, all but the sign. NumPy has no bfloat16.
EXPONENTS = {
    "F64": ("<u8", 0x7FF << 52),
    "F32": ("<u4", 0xFF << 23),
    "F16": ("<u2", 0x1F << 10),
    "BF16": ("<u2", 0xFF << 7),
    "F8_E5M2": ("u1", 0x1F << 2),
    "F8_E4M3": ("u1", 0x7F),
}


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file, without its data.

    Raises:
        ValueError: not a safetensors file.
    """
    with path.open("rb") as file:
        return read_head(file)[1]


def read_head(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """The bytes before the tensor data, and the parsed header; leaves the file at the data.

    Raises:
        ValueError: the header is not readable.
    """
    length = file.read(LENGTH_BYTES)
    size = int.from_bytes(length, "little")
    if size > LONGEST_HEADER:
        raise ValueError("it has no header (perhaps it is a pointer that git lfs has not replaced)")
    text = file.read(size)
    return length + text, _parse(text)


def _parse(text: bytes) -> dict[str, Any]:
    """Parse a header: metadata must be texts, dtypes known, and byte ranges must match shapes.

    Raises:
        ValueError: the header is not valid.
    """
    try:
        header: dict[str, Any] = json.loads(text)
        if not all(isinstance(note, str) for note in header.get(METADATA, {}).values()):
            raise ValueError("its metadata are not texts")
        for name, entry in header.items():
            if name != METADATA:
                _check_entry(name, **entry)
    # Errors from parsing arbitrary bytes; `_check_entry(**entry)` raises TypeError for unknown keys.
    except (TypeError, AttributeError, RecursionError, json.JSONDecodeError, UnicodeDecodeError):
        raise ValueError("its header cannot be read") from None
    return header


def _check_entry(name: str, dtype: str, shape: list[int], data_offsets: list[int]) -> None:
    if dtype not in BITS:
        raise ValueError(f"{name} has the unknown dtype {dtype!r}")
    # Not isinstance, since True is an int.
    are_numbers = all(type(number) is int and number >= 0 for number in (*shape, *data_offsets))
    bits = math.prod(shape) * BITS[dtype] if are_numbers else 0
    if not are_numbers or len(data_offsets) != 2 or bits != 8 * (data_offsets[1] - data_offsets[0]):
        raise ValueError(f"{name}, {dtype} of {shape}, cannot be at bytes {data_offsets}")


def not_finite(header: dict[str, Any], data: memoryview) -> list[str]:
    """The names of tensors with NaN or infinite values, in the data that follows a header."""
    import numpy as np  # imported late: commands that read no tensors do not need it

    guilty = []
    for name, entry in header.items():
        if name != METADATA and entry["dtype"] in EXPONENTS:
            width, exponent = EXPONENTS[entry["dtype"]]
            begin, end = entry["data_offsets"]
            bits = np.frombuffer(data[begin:end], width)
            if bool((bits & exponent == exponent).any()):
                guilty.append(name)
    return guilty


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
