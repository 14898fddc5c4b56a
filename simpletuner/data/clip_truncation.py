"""Detects that the end of a clip is missing, from the sizes that its container declares.

A clip is never called truncated because it seems too short: the last frame of a screen recording
may be shown for minutes, an edit list may hide frames, and containers round their durations. Only
bytes that are missing count.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

# Element numbers of Matroska.
EBML_HEADER = b"\x1aE\xdf\xa3"
SEGMENT = b"\x18S\x80g"
# Bytes of headers: of a chunk in AVI and its list, of a tag in FLV, of an object in ASF, of a GIF.
CHUNK = 8
LIST = 12
TAG = 11
OBJECT = 24
GIF_HEADER = 13
FLV_HEADER_SIZE = 5  # position of the header's size in the file
FLV_FOOTER = 4  # bytes behind each tag, which repeat its size
# First bytes of a GIF's blocks.
IMAGE = 0x2C
EXTENSION = 0x21
# Bits of the flags in front of a GIF's colour table.
COLOUR_TABLE = 0x80
COLOUR_TABLE_SIZE = 0x07


def is_truncated(path: Path, container_format: str) -> bool:
    """Whether bytes are missing at the end of a clip.

    Args:
        container_format: FFmpeg's name of the format; formats without declared sizes never miss
            anything.
    """
    declared_end = DECLARED_ENDS.get(container_format)
    if declared_end is None:
        return False
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        return declared_end(file, size) > size


def _end_of_matroska(file: BinaryIO, size: int) -> int:
    """The end of the segment, the second element of the file."""
    position = 0
    for element in (EBML_HEADER, SEGMENT):
        file.seek(position)
        if file.read(len(element)) != element:
            return 0
        length = _ebml_number(file)
        if length is None:
            return 0
        position = file.tell() + length
        if position > size:
            break
    return position


def _ebml_number(file: BinaryIO) -> int | None:
    """A number of 1 to 8 bytes, whose first byte has as many leading zeros as bytes follow.

    None if all its bits are set: the size is unknown, as in a live recording.
    """
    first = int.from_bytes(file.read(1), "big")
    following = 8 - first.bit_length()
    if following > 7:
        return None
    # The zeros and the one behind them are not part of the number.
    bits = 7 * (following + 1)
    mask = (1 << bits) - 1
    number = int.from_bytes(bytes([first]) + file.read(following), "big") & mask
    if number == mask:
        return None
    return number


def _end_of_avi(file: BinaryIO, size: int) -> int:
    """The end of the last list of frames; an index may be missing behind it."""
    end = 0
    position = 0
    while position + LIST <= size:
        name, length, kind = _chunk_at(file, position)
        if name == b"RIFF" and kind in (b"AVI ", b"AVIX"):
            position += LIST  # to the chunks that it contains
            continue
        if name == b"LIST" and kind == b"movi":
            end = position + CHUNK + length
        if not name.strip().isalnum():
            break
        position += CHUNK + length + length % 2  # chunks are padded to even sizes
    return end


def _chunk_at(file: BinaryIO, position: int) -> tuple[bytes, int, bytes]:
    """(name, length, first four bytes) of a RIFF chunk."""
    file.seek(position)
    header = file.read(LIST)
    return header[:4], int.from_bytes(header[4:8], "little"), header[8:]


def _end_of_flv(file: BinaryIO, size: int) -> int:
    """The end of the last tag."""
    file.seek(FLV_HEADER_SIZE)
    position = int.from_bytes(file.read(4), "big") + FLV_FOOTER
    while position + TAG <= size:
        file.seek(position + 1)
        length = int.from_bytes(file.read(3), "big")
        position += TAG + length + FLV_FOOTER
    # The four bytes behind the last tag repeat its size and hold no frame.
    return position - FLV_FOOTER


def _end_of_asf(file: BinaryIO, size: int) -> int:
    """The end of the second object, which holds the frames."""
    position = 0
    for _ in ("header", "data"):
        file.seek(position + OBJECT - 8)
        position += int.from_bytes(file.read(8), "little")
        if position > size:
            break
    return position


def _end_of_gif(file: BinaryIO, size: int) -> int:
    """The end of the last block that has begun; the mark at the end is often missing."""
    file.seek(0)
    header = file.read(GIF_HEADER).ljust(GIF_HEADER, b"\0")
    position = GIF_HEADER + _colour_table(header[10])
    while position < size:
        file.seek(position)
        block = file.read(10).ljust(10, b"\0")
        if block[0] == IMAGE:
            # A descriptor of 10 bytes, its colour table, and a byte with the width of codes.
            position += 11 + _colour_table(block[9])
        elif block[0] == EXTENSION:
            position += 2
        else:
            break
        position = _end_of_sub_blocks(file, position)
    return position


def _end_of_sub_blocks(file: BinaryIO, position: int) -> int:
    """The end of a chain of sub-blocks.

    Each begins with its size in a byte, and an empty one ends them.
    """
    while True:
        file.seek(position)
        length = file.read(1)
        if not length:
            return position
        position += 1 + length[0]
        if not length[0]:
            return position


def _colour_table(flags: int) -> int:
    """Size in bytes of a colour table, by the flags in front of it."""
    if not flags & COLOUR_TABLE:
        return 0
    colours = 2 << (flags & COLOUR_TABLE_SIZE)
    return 3 * colours


# Reads the position at which the frames end, by FFmpeg's name of the format; 0 if not declared.
DECLARED_ENDS: dict[str, Callable[[BinaryIO, int], int]] = {
    "matroska,webm": _end_of_matroska,
    "avi": _end_of_avi,
    "flv": _end_of_flv,
    "asf": _end_of_asf,
    "gif": _end_of_gif,
}
