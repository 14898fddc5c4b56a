"""A profile of Display P3, for pictures that name these colours by a number (ICC.1:2022).

They hold no profile, and Pillow cannot make one from primaries.
"""

from __future__ import annotations

import struct
from functools import cache

from simpletuner.rounding import round_up

DISPLAY_P3 = 12  # colour primaries in ITU-T H.273

WHITE = (0.9642, 1.0, 0.8249)  # D50, the white of all profiles
# XYZ of the full primaries, adapted to D50.
RED = (0.51512, 0.24120, -0.00105)
GREEN = (0.29198, 0.69225, 0.04189)
BLUE = (0.15710, 0.06657, 0.78407)
# The curve of sRGB: exponent, scale and offset of its power, slope of its straight part, and the
# end of that part.
CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
CURVE_KIND = 3
HEADER_SIZE = 128
ENTRY_SIZE = 12


@cache
def display_p3() -> bytes:
    """The bytes of the profile."""
    curve = b"para" + struct.pack(">IHH", 0, CURVE_KIND, 0) + _fixed(CURVE)
    name = "Display P3".encode("utf-16-be")
    tags = {
        b"desc": b"mluc" + struct.pack(">III4sII", 0, 1, 12, b"enUS", len(name), 28) + name,
        b"wtpt": _xyz(WHITE),
        b"rXYZ": _xyz(RED),
        b"gXYZ": _xyz(GREEN),
        b"bXYZ": _xyz(BLUE),
        b"rTRC": curve,
        b"gTRC": curve,
        b"bTRC": curve,
    }
    contents = b""
    table = struct.pack(">I", len(tags))
    start = HEADER_SIZE + len(table) + ENTRY_SIZE * len(tags)
    for tag, content in tags.items():
        table += tag + struct.pack(">II", start + len(contents), len(content))
        # Every tag begins at a multiple of four bytes.
        contents += content.ljust(round_up(len(content), 4), b"\0")
    body = table + contents

    version = 0x04300000  # 4.3
    header = struct.pack(">I4xI", HEADER_SIZE + len(body), version)
    header += b"mntrRGB XYZ "  # a display with RGB colours, described in XYZ
    header += bytes(12) + b"acsp"
    header += bytes(28) + _fixed(WHITE)
    return header.ljust(HEADER_SIZE, b"\0") + body


def _xyz(numbers: tuple[float, ...]) -> bytes:
    return b"XYZ \0\0\0\0" + _fixed(numbers)


def _fixed(numbers: tuple[float, ...]) -> bytes:
    """Numbers as signed 16.16 fixed point."""
    fixed = [round(number * 65536) for number in numbers]
    return struct.pack(f">{len(fixed)}i", *fixed)
