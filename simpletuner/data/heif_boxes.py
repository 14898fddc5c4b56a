"""The boxes of AVIF and HEIC files (ISO/IEC 14496-12 and 23008-12): whether they are complete, and
their properties.

Pillow reports neither the colour codes of such a picture nor its clean aperture, so they are read
here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from simpletuner.data.files import MediaError

# Boxes at the top of a file. Phones append data of their own, which is no box.
TOP_LEVEL = frozenset(
    {b"ftyp", b"meta", b"mdat", b"moov", b"free", b"skip", b"uuid", b"idat", b"styp"}
)
# Boxes on the way to the description of a sequence's frames: bytes of their own before the first
# inner box.
DESCRIBED_IN = {
    b"moov": 0,
    b"trak": 0,
    b"mdia": 0,
    b"minf": 0,
    b"stbl": 0,
    b"stsd": 8,
    b"av01": 78,
    b"hvc1": 78,
    b"hev1": 78,
}
FULL_BOX = 4  # bytes of version and flags before the content of some boxes


@dataclass(frozen=True)
class Box:
    """A box: its type, and where its content begins and ends, which may lie beyond the end of a
    truncated file.
    """

    kind: bytes
    start: int
    end: int


@dataclass(frozen=True)
class Aperture:
    """The part of a picture to show.

    Attributes:
        width, height: of the part, in pixels.
        right, down: how far its centre lies from that of the picture.
    """

    width: Fraction
    height: Fraction
    right: Fraction
    down: Fraction

    def within(self, size: tuple[int, int]) -> tuple[int, int, int, int] | None:
        """Left, top, right and bottom edge in a picture; None if they are not whole pixels inside
        of it.
        """
        left = (size[0] - self.width) / 2 + self.right
        top = (size[1] - self.height) / 2 + self.down
        right = left + self.width
        bottom = top + self.height
        if any(edge.denominator != 1 for edge in (left, top, right, bottom)):
            return None
        if not (0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]):
            return None
        return int(left), int(top), int(right), int(bottom)


@dataclass(frozen=True)
class Properties:
    """What a file says about the picture that it shows.

    Attributes:
        codes: colour primaries and transfer curve, as numbers of ITU-T H.273; None if there are
            none.
        aperture: the part to show; None shows everything.
    """

    codes: tuple[int, int] | None = None
    aperture: Aperture | None = None


def boxes(data: bytes, start: int = 0, end: int | None = None) -> Iterator[Box]:
    """The boxes of a part of a file, up to the first damaged one."""
    end = len(data) if end is None else end
    while start + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, start)
        header = 8
        if size == 1 and start + 16 <= end:
            (size,) = struct.unpack_from(">Q", data, start + 8)
            header = 16
        if size == 0:  # up to the end of the file
            size = end - start
        if size < header:
            return
        yield Box(kind, start + header, start + size)
        start += size


def holds_whole_boxes(data: bytes) -> bool:
    """Whether no box of a file reaches beyond its end.

    Raises:
        MediaError: the box that describes the picture is missing.
    """
    kinds: set[bytes] = set()
    for box in boxes(data):
        if box.kind not in TOP_LEVEL:
            break
        if box.end > len(data):
            return False
        kinds.add(box.kind)
    if kinds.isdisjoint({b"meta", b"moov"}):
        raise MediaError("is damaged: it holds no picture")
    return True


def shown_properties(data: bytes) -> Properties:
    """The properties of the primary picture, or of the frames of a sequence; empty if the boxes are
    damaged.
    """
    try:
        return _parsed(_primary_properties(data) or _frame_properties(data, 0, len(data)))
    except (struct.error, IndexError, ZeroDivisionError):
        return Properties()


def _parsed(properties: list[tuple[bytes, bytes]]) -> Properties:
    codes: tuple[int, int] | None = None
    aperture: Aperture | None = None
    for kind, content in properties:
        if kind == b"colr" and content[:4] == b"nclx":
            primaries, curve = struct.unpack_from(">HH", content, 4)
            codes = primaries, curve
        if kind == b"clap":
            # Width, height, and the offsets to the right and down, each with its denominator.
            numbers = struct.unpack_from(">IIIIiIiI", content)
            aperture = Aperture(*map(Fraction, numbers[::2], numbers[1::2]))
    return Properties(codes, aperture)


def _primary_properties(data: bytes) -> list[tuple[bytes, bytes]]:
    """(type, content) of every property of the primary item."""
    meta = _first_box(data, b"meta", 0, len(data))
    if meta is None:
        return []
    primary = _first_box(data, b"pitm", meta.start + FULL_BOX, meta.end)
    described = _first_box(data, b"iprp", meta.start + FULL_BOX, meta.end)
    if primary is None or described is None:
        return []
    layout = ">I" if data[primary.start] else ">H"  # by the box's version
    (item,) = struct.unpack_from(layout, data, primary.start + FULL_BOX)
    container = _first_box(data, b"ipco", described.start, described.end)
    if container is None:
        return []
    properties = [
        (box.kind, data[box.start : box.end]) for box in boxes(data, container.start, container.end)
    ]
    numbers: list[int] = []
    for box in boxes(data, described.start, described.end):
        if box.kind == b"ipma":
            numbers += _associated(data, box, item)
    # Number 0 stands for no property.
    return [properties[number - 1] for number in numbers if 0 < number <= len(properties)]


def _associated(data: bytes, box: Box, item: int) -> list[int]:
    """Numbers of the properties that an `ipma` box gives to an item, counted from 1."""
    has_long_ids = data[box.start] > 0
    is_wide = bool(data[box.start + 3] & 1)
    (count,) = struct.unpack_from(">I", data, box.start + FULL_BOX)
    position = box.start + FULL_BOX + 4
    for _ in range(count):
        (owner,) = struct.unpack_from(">I" if has_long_ids else ">H", data, position)
        position += 4 if has_long_ids else 2
        length = data[position]
        position += 1
        numbers = struct.unpack_from(f">{length}{'H' if is_wide else 'B'}", data, position)
        position += length * (2 if is_wide else 1)
        if owner == item:
            # The highest bit says that the property is essential.
            return [number & (0x7FFF if is_wide else 0x7F) for number in numbers]
    return []


def _frame_properties(data: bytes, start: int, end: int) -> list[tuple[bytes, bytes]]:
    """The colours of the frames of a sequence."""
    properties = []
    for box in boxes(data, start, end):
        if box.kind in DESCRIBED_IN:
            properties += _frame_properties(data, box.start + DESCRIBED_IN[box.kind], box.end)
        elif box.kind == b"colr" and start:
            properties.append((box.kind, data[box.start : box.end]))
    return properties


def _first_box(data: bytes, kind: bytes, start: int, end: int) -> Box | None:
    """The first box of a type in a part of a file."""
    for box in boxes(data, start, end):
        if box.kind == kind:
            return box
    return None
