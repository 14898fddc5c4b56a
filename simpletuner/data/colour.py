"""Colours: how a file defines its numbers, and their conversion to sRGB.

Models are trained on sRGB. A colour profile declares that a file holds something else: phones write
Display P3, print shops CMYK. Profiles are applied as viewers do: relative to white, with colours
that sRGB lacks moved to its edge.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

from simpletuner.data.files import UnsuitableError, describe

# Transfer curves and primaries that 8-bit sRGB or BT.709 cannot represent, by their numbers in
# ITU-T H.273 (tables 3 and 2).
PQ = 16
HLG = 18
HDR_CURVES = {PQ: "PQ", HLG: "HLG"}
WIDE_COLOURS = {9: "BT.2020"}

# How Pillow's modes count colours, and what a profile for them calls its colours.
SPACES = {"RGB": "RGB ", "L": "GRAY", "CMYK": "CMYK", "LAB": "Lab "}
DEEP_GREY = ("I", "F")  # first letters of modes with more than 8 bits
# Levels of 255. A profile that changes no colour by more is sRGB: rounding alone may change one
# level.
SAME_COLOURS = 1
LATTICE = 17  # colours along each side of the cube that a profile is tried on
# Words in the name of a profile for HDR; PQ is also called SMPTE ST 2084.
HDR_NAMES = re.compile(r"\b(PQ|HLG)\b|(2084)", re.IGNORECASE)


def refuse_hdr(curves: Iterable[int], primaries: Iterable[int], shown: str, remedy: str) -> None:
    """Refuse colours that players and viewers show correctly but that would be decoded wrongly.

    Args:
        curves, primaries: numbers of ITU-T H.273; those that are not known are harmless.
        shown: what is decoded, such as "frames".
        remedy: the standard to convert to.

    Raises:
        UnsuitableError: HDR or wide colours.
    """
    kinds: list[str] = []
    for curve in curves:
        if curve in HDR_CURVES:
            kinds.append(f"HDR ({HDR_CURVES[curve]})")
    for number in primaries:
        if number in WIDE_COLOURS:
            kinds.append(f"in wide colours ({WIDE_COLOURS[number]})")
    if kinds:
        raise UnsuitableError(
            f"is {kinds[0]}, which 8-bit {shown} cannot represent; convert it to SDR ({remedy})"
        )


def refuse_hdr_profile(profile: bytes) -> None:
    """Refuse a profile for HDR, by its colour codes or its name.

    Raises:
        UnsuitableError: the profile is for PQ or HLG, or it is broken.
    """
    curves: set[int] = set()
    # A type and four zero bytes, then primaries and curve.
    codes = _tag(profile, b"cicp")
    if len(codes) > 9:
        curves.add(codes[9])
    name = HDR_NAMES.search(profile_name(profile))
    if name is not None:
        curves.add(HLG if name[0].upper() == "HLG" else PQ)
    refuse_hdr(curves, (), "pictures", "sRGB")


def _tag(profile: bytes, wanted: bytes) -> bytes:
    """The content of a tag of a profile; empty if it is missing."""
    try:
        (count,) = struct.unpack_from(">I", profile, 128)  # the tag table follows the header
        for number in range(min(count, 200)):
            name, offset, size = struct.unpack_from(">4sII", profile, 132 + 12 * number)
            if name == wanted:
                return profile[offset : offset + size]
    except struct.error:  # the profile ends too early
        pass
    return b""


@lru_cache(maxsize=64)
def profile_name(profile: bytes) -> str:
    """What a profile calls itself, such as "Display P3".

    Raises:
        UnsuitableError: the profile is broken.
    """
    try:
        return (ImageCms.getProfileDescription(_open_profile(profile)) or "").strip()
    except (ImageCms.PyCMSError, OSError, ValueError) as error:
        raise _broken(error) from error


def space_of(mode: str) -> str:
    """The key of `SPACES` for a picture's mode; empty for a mode without profiles."""
    if mode.startswith(DEEP_GREY) or mode in ("L", "LA", "La"):
        return "L"
    if mode in ("CMYK", "LAB"):
        return mode
    if mode == "1":
        return ""
    return "RGB"


# The profiles of a folder are few: one for each camera or editor.
@lru_cache(maxsize=64)
def to_srgb(profile: bytes, space: str) -> ImageCms.ImageCmsTransform | None:
    """The conversion of colours to sRGB; None if a profile changes nothing or does not apply.

    A profile for other colours, such as that of a photo in a picture that was made grey, is ignored
    by viewers too.

    Args:
        space: a key of `SPACES`.

    Raises:
        UnsuitableError: the profile is broken.
    """
    try:
        source = _open_profile(profile)
        if source.profile.xcolor_space != SPACES.get(space):
            return None
        transform = ImageCms.buildTransform(
            source,
            ImageCms.createProfile("sRGB"),
            inMode=space,
            outMode="RGB",
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        )
        if not _changes_colours(transform, space):
            return None
        return transform
    except (ImageCms.PyCMSError, OSError, ValueError) as error:
        raise _broken(error) from error


def _open_profile(profile: bytes) -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(io.BytesIO(profile))


def _broken(error: Exception) -> UnsuitableError:
    remedy = "convert the file to sRGB, or remove the profile"
    return UnsuitableError(
        f"has a broken colour profile, so its colours are unknown; {remedy} ({describe(error)})"
    )


def _changes_colours(transform: ImageCms.ImageCmsTransform, space: str) -> bool:
    """Whether a conversion changes a colour by more than `SAME_COLOURS`.

    It is tried on a lattice of colours, or on all greys.
    """
    if space not in ("RGB", "L"):
        return True
    if space == "RGB":
        levels = np.linspace(0, 255, LATTICE).round().astype(np.uint8)
        cube = np.stack(np.meshgrid(levels, levels, levels), axis=-1)
        colours = Image.fromarray(cube.reshape(LATTICE, -1, 3))
    else:
        greys = np.arange(256, dtype=np.uint8)
        colours = Image.fromarray(greys[None])
    converted = np.asarray(transform.apply(colours), dtype=int)
    difference = np.abs(converted - np.asarray(colours.convert("RGB")))
    return int(difference.max()) > SAME_COLOURS
