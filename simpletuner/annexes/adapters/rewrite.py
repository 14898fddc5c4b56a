"""A new safetensors file from the tensors of another: renamed, scaled, written piece by piece.

Needs no torch, and memory for one tensor, so that the page can send such a file as a download.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from simpletuner.atomic import open_atomically
from simpletuner.headers import METADATA, join_header, read_head

# Dtypes of the format by numpy's name of their bits, in the order in which the library writes them.
BITS = {
    "F64": "<f8",
    "F32": "<f4",
    "BF16": "<u2",
    "F16": "<f2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
}
# Whose range is so large that a factor of a power of two changes only the exponent.
WIDE = ("F64", "F32", "BF16")


@dataclass(frozen=True)
class Piece:
    """A tensor of a new file.

    Attributes:
        name: in the new file.
        entry: dtype, shape and offsets in the source.
        factor: what its values are multiplied with.
    """

    name: str
    entry: Mapping[str, Any]
    factor: float = 1.0

    @property
    def dtype(self) -> str:
        """The dtype in the new file: the source's where that is exact, else one of 32 bits."""
        dtype = str(self.entry["dtype"])
        if self.factor == 1.0 or dtype == "F64":
            return dtype
        is_power_of_two = math.frexp(abs(self.factor))[0] == 0.5
        if is_power_of_two and dtype in WIDE:
            return dtype
        return "F32"

    @property
    def size(self) -> int:
        """Bytes in the new file."""
        start, end = self.entry["data_offsets"]
        if self.dtype == self.entry["dtype"]:
            return int(end - start)
        return math.prod(self.entry["shape"]) * np.dtype(BITS[self.dtype]).itemsize

    @property
    def order(self) -> tuple[int, str]:
        """A sort key: larger dtypes come first, as the library writes them."""
        dtypes = [*BITS]
        place = dtypes.index(self.dtype) if self.dtype in dtypes else len(dtypes)
        return place, self.name

    def read(self, file: BinaryIO, data_start: int) -> bytes:
        """Its bytes in the new file.

        Args:
            file: the source.
            data_start: position of the first tensor in the source.
        """
        start, end = self.entry["data_offsets"]
        file.seek(data_start + start)
        content = file.read(end - start)
        if self.factor == 1.0:
            return content
        return scaled(content, self.entry["dtype"], self.factor, self.dtype)


@dataclass(frozen=True)
class Rewritten:
    """A new file, which is not written yet.

    Attributes:
        notes: entries of its header.
    """

    source: Path
    notes: Mapping[str, str]
    pieces: Sequence[Piece]

    @property
    def ordered(self) -> list[Piece]:
        """The pieces in the order of the file."""
        return sorted(self.pieces, key=lambda piece: piece.order)

    @property
    def head(self) -> bytes:
        """The bytes before the tensors."""
        header: dict[str, Any] = {METADATA: {"format": "pt", **self.notes}}
        offset = 0
        for piece in self.ordered:
            end = offset + piece.size
            header[piece.name] = {
                "dtype": piece.dtype,
                "shape": list(piece.entry["shape"]),
                "data_offsets": [offset, end],
            }
            offset = end
        return join_header(header, b"")

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.head) + sum(piece.size for piece in self.pieces)

    def parts(self) -> Iterator[bytes]:
        """The bytes of the file: the header, then tensor by tensor."""
        with self.source.open("rb") as file:
            read_head(file)
            data_start = file.tell()
            yield self.head
            for piece in self.ordered:
                yield piece.read(file, data_start)

    def write(self, target: Path) -> None:
        """Write the file, atomically."""
        with open_atomically(target) as output:
            for part in self.parts():
                output.write(part)


def scaled(content: bytes, dtype: str, factor: float, wanted: str) -> bytes:
    """The bytes of a tensor times a factor, in the wanted dtype: the same, or one of 32 bits."""
    values = decoded(content, dtype)
    product = values * values.dtype.type(factor)
    if wanted == "BF16":  # exact: the factor has changed exponents only
        return bytes((product.view("<u4") >> 16).astype("<u2").tobytes())
    return bytes(product.tobytes())


def decoded(content: bytes, dtype: str) -> NDArray[Any]:
    """The values of a tensor, with 64 bits if it has them, else with 32."""
    bits: NDArray[Any] = np.frombuffer(content, BITS[dtype])
    if dtype == "BF16":
        return (bits.astype("<u4") << 16).view("<f4")
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (bits.astype("<u2") << 8).view("<f2").astype("<f4")
    if dtype == "F8_E4M3":
        return _values_of_e4m3()[bits]
    return bits if dtype == "F64" else bits.astype("<f4")


def _values_of_e4m3() -> NDArray[Any]:
    """The values of the 256 codes of float8_e4m3fn: sign, 4 bits of exponent, 3 of mantissa."""
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> 3) & 0xF
    mantissa = codes & 0x7
    is_subnormal = exponent == 0
    fraction = np.where(is_subnormal, mantissa / 8, 1 + mantissa / 8)
    values = sign * fraction * np.exp2(np.where(is_subnormal, 1, exponent) - 7.0)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return values.astype("<f4")
