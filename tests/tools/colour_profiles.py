"""Colour profiles made by hand (ICC.1:2001), and their colours in sRGB by plain arithmetic."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simpletuner.rounding import round_up

Floats = NDArray[np.float64]
Chromaticities = tuple[tuple[float, float], tuple[float, float], tuple[float, float]]

SRGB: Chromaticities = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
DISPLAY_P3: Chromaticities = ((0.68, 0.32), (0.265, 0.69), (0.15, 0.06))
ADOBE_RGB: Chromaticities = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
D65 = np.array([0.95047, 1.0, 1.08883])
D50 = np.array([0.9642, 1.0, 0.8249])
# From XYZ to the responses of the eye's cones, in which white adapts.
BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)
# Profiles store a gamma in 256ths.
ADOBE_GAMMA = 563 / 256


def colorants(primaries: Chromaticities) -> Floats:
    """The matrix from linear RGB with a white of D65 to XYZ with a white of D50."""
    columns = np.array([[x / y, 1.0, (1 - x - y) / y] for x, y in primaries]).T
    # Full red, green and blue together must give the white.
    to_xyz = columns * np.linalg.solve(columns, D65)
    gains = (BRADFORD @ D50) / (BRADFORD @ D65)
    adapted: Floats = np.linalg.inv(BRADFORD) @ np.diag(gains) @ BRADFORD @ to_xyz
    return adapted


def rgb_profile(
    primaries: Chromaticities, gamma: float, name: str = "made by hand", cicp: bytes = b""
) -> bytes:
    """A profile of three primaries and a gamma, as those of cameras and displays."""
    tags = {b"wtpt": _xyz(D50)}
    for letter, column in zip((b"r", b"g", b"b"), colorants(primaries).T, strict=True):
        tags[letter + b"XYZ"] = _xyz(column)
        tags[letter + b"TRC"] = _gamma(gamma)
    if cicp:
        tags[b"cicp"] = b"cicp\0\0\0\0" + cicp
    return _profile(kind=b"mntr", space=b"RGB ", connection=b"XYZ ", tags=tags, name=name)


def grey_profile(gamma: float) -> bytes:
    """A profile of grey levels with a gamma."""
    tags = {b"wtpt": _xyz(D50), b"kTRC": _gamma(gamma)}
    return _profile(kind=b"mntr", space=b"GRAY", connection=b"XYZ ", tags=tags, name="grey")


def cmyk_profile(corners: Sequence[tuple[int, int, int]]) -> bytes:
    """A profile of four inks.

    Args:
        corners: colours (L, a + 128, b + 128, all 0..255) of all 16 combinations of full inks,
            yellow varying before magenta and cyan, and black first.
    """
    # A lookup table of type mft1: 4 inputs, 3 outputs, a grid of 2 points per input, an identity
    # matrix; then the input curves, the grid and the output curves.
    ramp = bytes(range(256))
    identity = b"".join(_fixed(number) for number in np.eye(3).ravel())
    table = b"mft1\0\0\0\0" + bytes([4, 3, 2, 0]) + identity
    table += ramp * 4 + bytes(np.array(corners, dtype=np.uint8)) + ramp * 3
    tags = {b"wtpt": _xyz(D50), b"A2B0": table, b"A2B1": table}
    return _profile(kind=b"prtr", space=b"CMYK", connection=b"Lab ", tags=tags, name="inks")


def to_srgb(xyz: Floats) -> NDArray[np.uint8]:
    """XYZ (`... 3`) with a white of D50 as 8-bit sRGB; colours outside are clipped."""
    linear = np.clip(xyz @ np.linalg.inv(colorants(SRGB)).T, 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.rint(encoded * 255).astype(np.uint8)


def rgb_in_srgb(
    pixels: NDArray[np.uint8], primaries: Chromaticities, gamma: float | None
) -> NDArray[np.uint8]:
    """Pixels of an `rgb_profile` in sRGB, all 8-bit; without a gamma, they have sRGB's curve."""
    values = pixels / 255.0
    if gamma is None:
        linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    else:
        linear = values**gamma
    return to_srgb(linear @ colorants(primaries).T)


def grey_in_srgb(levels: NDArray[np.uint8], gamma: float) -> NDArray[np.uint8]:
    """Levels of a `grey_profile` in sRGB, `... 3`, all 8-bit."""
    brightness = (levels / 255.0) ** gamma
    return to_srgb(brightness[..., None] * D50)


def lab_in_srgb(lightness: float, a: float, b: float) -> NDArray[np.uint8]:
    """A CIELAB colour in sRGB."""
    middle = (lightness + 16) / 116
    roots = np.array([middle + a / 500, middle, middle - b / 200])
    linear = np.where(roots > 6 / 29, roots**3, 3 * (6 / 29) ** 2 * (roots - 4 / 29))
    return to_srgb(linear * D50)


def _fixed(number: float) -> bytes:
    """A number as s15Fixed16: in 65536ths, signed."""
    return struct.pack(">i", round(number * 65536))


def _xyz(numbers: Floats) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(map(_fixed, numbers))


def _gamma(gamma: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + b"\0\0"


def _profile(
    kind: bytes, space: bytes, connection: bytes, tags: dict[bytes, bytes], name: str
) -> bytes:
    """The file: a header of 128 bytes, a table of tags, and what they hold."""
    text = name.encode() + b"\0"
    described = {b"desc": b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + bytes(78), **tags}
    position = 128 + 4 + 12 * len(described)
    table = b""
    contents = b""
    for tag, content in described.items():
        table += tag + struct.pack(">II", position + len(contents), len(content))
        contents += content.ljust(round_up(len(content), 4), b"\0")
    body = struct.pack(">I", len(described)) + table + contents
    header = struct.pack(">I", 128 + len(body)) + bytes(4)
    version = b"\x02\x40\0\0"
    header += version + kind + space + connection
    header += bytes(12) + b"acsp" + bytes(28) + b"".join(map(_fixed, D50))
    return header.ljust(128, b"\0") + body
