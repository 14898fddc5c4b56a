"""The boxes of AVIF and HEIF files (ISO/IEC 14496-12, 23008-12): completeness and properties.

Pillow reports neither the colour codes of such a picture nor its clean aperture.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from simpletuner.data.files import MediaError

# Boxes at the top of a file. Phones append data of their own, which is not a box.
TOP_LEVEL = frozenset(
    {b"ftyp", b"meta", b"mdat", b"moov", b"free", b"skip", b"uuid", b"idat", b"styp"}
)
# Boxes on the way to the description of a sequence's frames, with the bytes that each has before
# its first inner box.
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
    """A box: its type, and where its content begins and ends.

    The end may lie beyond that of a truncated file.
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
        """Left, top, right and bottom edge in a picture.

        None if they are not whole pixels inside of it.
        """
        width, height = size
        left = (width - self.width) / 2 + self.right
        top = (height - self.height) / 2 + self.down
        right = left + self.width
        bottom = top + self.height
        if any(edge.denominator != 1 for edge in (left, top, right, bottom)):
            return None
        is_inside = 0 <= left < right <= width and 0 <= top < bottom <= height
        if not is_inside:
            return None
        return int(left), int(top), int(right), int(bottom)


@dataclass(frozen=True)
class Properties:
    """What a file declares about the picture that it shows.

    Attributes:
        codes: colour primaries and transfer curve, as numbers of ITU-T H.273, or None.
        aperture: the part to show; None shows everything.
    """

    codes: tuple[int, int] | None = None
    aperture: Aperture | None = None


def boxes(data: bytes, start: int = 0, end: int | None = None) -> Iterator[Box]:
    """The boxes of a part of a file, up to the first damaged one."""
    if end is None:
        end = len(data)
    while start + 8 <= end:
        size, kind = struct.unpack_from(">I4s", data, start)
        header = 8
        if size == 1 and start + 16 <= end:  # the size follows, in eight bytes
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
    """The properties of the primary picture, or of the frames of a sequence.

    Empty if the boxes are damaged.
    """
    try:
        properties = _primary_properties(data) or _frame_properties(data, 0, len(data))
        return _parsed(properties)
    except (struct.error, IndexError, ZeroDivisionError):
        return Properties()


def _parsed(properties: list[tuple[bytes, bytes]]) -> Properties:
    """Colour codes and aperture among the properties, which are given as (type, content)."""
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
    # The version and the flags of the box decide how many bytes its numbers have.
    has_long_ids = data[box.start] > 0
    is_wide = bool(data[box.start + 3] & 1)
    id_layout = ">I" if has_long_ids else ">H"
    number_layout = "H" if is_wide else "B"
    # The highest bit marks a property as essential.
    number_mask = 0x7FFF if is_wide else 0x7F
    (count,) = struct.unpack_from(">I", data, box.start + FULL_BOX)
    position = box.start + FULL_BOX + 4
    for _ in range(count):
        (owner,) = struct.unpack_from(id_layout, data, position)
        position += struct.calcsize(id_layout)
        length = data[position]
        position += 1
        numbers_layout = f">{length}{number_layout}"
        numbers = struct.unpack_from(numbers_layout, data, position)
        position += struct.calcsize(numbers_layout)
        if owner == item:
            return [number & number_mask for number in numbers]
    return []


def _frame_properties(data: bytes, start: int, end: int) -> list[tuple[bytes, bytes]]:
    """(type, content) of the colours of a sequence's frames."""
    properties: list[tuple[bytes, bytes]] = []
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
