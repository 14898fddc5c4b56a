"""Whether a picture file is whole, seen from its structure, without decoding a pixel.

Decoders forgive: a PNG without its end decodes, a JPEG that was cut is filled with grey. Such a file is the trace of a
broken download or a full disk, so it is reported and not trained on.
"""

from __future__ import annotations

import re
import struct
from typing import BinaryIO

from PIL import TiffImagePlugin

# What a file may begin with, and the name of Pillow's reader for it.
MAGIC = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
)
# Containers that cameras and browsers write and that are not read here; the name helps the user to convert.
FOREIGN = {b"avif": "AVIF", b"avis": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIF", b"msf1": "HEIF"}

JPEG_END = b"\xff\xd9"
# Inside compressed data FF is followed by 00, by a restart marker or by more FF; anything else is a marker.
JPEG_MARKER_IN_DATA = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
JPEG_START_OF_SCAN, JPEG_END_OF_IMAGE = 0xDA, 0xD9

STRIP_TAGS = ((273, 279), (324, 325))  # TIFF offsets and byte counts of strips, and of tiles


class MediaError(Exception):
    """A file that cannot be used as a picture; the text says why and fits after the file's name."""


def sniff(head: bytes) -> str:
    """Pillow's name of the format that a file begins like.

    Args:
        head: the first 16 bytes or more.

    Raises:
        MediaError: empty, or no picture format that is read here.
    """
    if not head:
        raise MediaError("is empty")
    for magic, kind in MAGIC:
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp" and head[8:12] in FOREIGN:
        raise MediaError(f"is a picture in {FOREIGN[head[8:12]]} format, which is not read; convert it to PNG or JPEG")
    raise MediaError("is not a picture")


def check_complete(file: BinaryIO, kind: str, size: int) -> None:
    """Walk the structure of a file to its end.

    Args:
        file: the open file; its position changes.
        kind: what `sniff` said.
        size: bytes in the file.

    Raises:
        MediaError: the end is missing.
    """
    checks = {"JPEG": _jpeg_end, "PNG": _png_end, "WEBP": _webp_end, "BMP": _bmp_end, "GIF": _gif_end}
    if kind in checks and not checks[kind](file, size):
        raise MediaError(f"is truncated: the {kind} data ends too early")


def check_strips(tags: TiffImagePlugin.ImageFileDirectory_v2, size: int) -> None:
    """The TIFF form of `check_complete`, which needs the directory that Pillow has read.

    Raises:
        MediaError: pixel data would lie behind the end of the file.
    """
    for offsets, counts in STRIP_TAGS:
        if offsets not in tags or counts not in tags:
            continue
        if any(start + count > size for start, count in zip(tags[offsets], tags[counts], strict=False)):
            raise MediaError("is truncated: the TIFF data ends too early")


def png_has_orientation(file: BinaryIO, size: int) -> bool:
    """Whether any PNG chunk may hold an orientation; asking Pillow for it would decode the whole picture."""
    for kind, start, length in _png_chunks(file, size):
        if kind == b"eXIf":
            return True
        if kind in (b"tEXt", b"zTXt", b"iTXt"):
            file.seek(start)
            text = file.read(min(length, 1 << 20))
            if text.startswith(b"Raw profile type exif") or b"Orientation" in text:
                return True
    return False


def _png_chunks(file: BinaryIO, size: int) -> list[tuple[bytes, int, int]]:
    """Type, position of the data and length of each chunk that lies wholly inside the file."""
    chunks = []
    position = 8
    while position + 12 <= size:
        file.seek(position)
        length, kind = struct.unpack(">I4s", file.read(8))
        if position + 12 + length > size:
            break
        chunks.append((kind, position + 8, length))
        position += 12 + length
        if kind == b"IEND":
            break
    return chunks


def _png_end(file: BinaryIO, size: int) -> bool:
    chunks = _png_chunks(file, size)
    return bool(chunks) and chunks[-1][0] == b"IEND"


def _jpeg_end(file: BinaryIO, size: int) -> bool:
    """Cameras and editors add data after the end marker, so where the last bytes do not tell, walk the segments."""
    file.seek(max(0, size - 2))
    if file.read(2) == JPEG_END:
        return True
    file.seek(0)
    data = file.read()
    position = 2
    while position + 4 <= size:
        if data[position] != 0xFF:
            return False
        marker = data[position + 1]
        if marker == JPEG_END_OF_IMAGE:
            return True
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
        if marker == JPEG_START_OF_SCAN:
            following = JPEG_MARKER_IN_DATA.search(data, position)
            if following is None:
                return False
            position = following.start()
    return data[position : position + 2] == JPEG_END


def _webp_end(file: BinaryIO, size: int) -> bool:
    file.seek(4)
    return size >= int.from_bytes(file.read(4), "little") + 8


def _bmp_end(file: BinaryIO, size: int) -> bool:
    file.seek(2)
    return size >= int.from_bytes(file.read(4), "little")


def _gif_end(file: BinaryIO, size: int) -> bool:
    """The trailer byte, with the zero padding that some writers add."""
    file.seek(max(0, size - 64))
    return file.read().rstrip(b"\0").endswith(b";")
