"""Colours: what a file declares about its numbers is applied, or the file is refused."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from simpletuner.data.files import UnsuitableError
from simpletuner.data.pictures import decode, inspect
from tests.tools import colour_profiles
from tests.tools.pictures import photograph, scene

pillow_heif.register_heif_opener()  # to write such files

P3 = colour_profiles.rgb_profile(colour_profiles.DISPLAY_P3, 2.2)
RGB_PROFILES = {
    "Display P3": (colour_profiles.DISPLAY_P3, 2.2),
    "Adobe RGB": (colour_profiles.ADOBE_RGB, colour_profiles.ADOBE_GAMMA),
    "sRGB primaries with gamma 1.8": (colour_profiles.SRGB, 1.8),
}
SAVED = {
    ".png": {},
    ".webp": {"lossless": True},
    ".tif": {},
    ".jpg": {"quality": 100, "subsampling": 0},
}


def photo(tmp_path: Path) -> Image.Image:
    photograph(tmp_path / "photo.png", (96, 64))
    return Image.open(tmp_path / "photo.png").convert("RGB")


def saved(picture: Image.Image, kind: str = "PNG", **settings: object) -> bytes:
    memory = io.BytesIO()
    picture.save(memory, kind, **settings)
    return memory.getvalue()


def difference(picture: Image.Image, expected: NDArray[np.uint8]) -> int:
    """The largest difference in levels."""
    return int(np.abs(np.asarray(picture).astype(int) - expected).max())


@pytest.mark.parametrize("suffix", SAVED)
@pytest.mark.parametrize("name", RGB_PROFILES)
def test_a_profile_is_applied_within_a_level_of_the_arithmetic(
    name: str, suffix: str, tmp_path: Path
) -> None:
    primaries, gamma = RGB_PROFILES[name]
    path = tmp_path / f"a{suffix}"
    profile = colour_profiles.rgb_profile(primaries, gamma)
    photo(tmp_path).save(path, icc_profile=profile, **SAVED[suffix])
    stored = np.asarray(Image.open(path))
    expected = colour_profiles.rgb_in_srgb(stored, primaries, gamma)

    assert difference(Image.fromarray(stored), expected) > 3, (
        "without the profile it looks different"
    )
    assert difference(decode(path), expected) <= 1
    assert inspect(path).conversions == ("converted to sRGB",)


@pytest.mark.parametrize("mode", ["L", "I;16"])
def test_a_grey_profile_is_applied(mode: str) -> None:
    levels = np.tile(np.arange(256, dtype=np.uint8), (4, 1))
    stored = levels if mode == "L" else levels.astype(np.uint16) * 257
    data = saved(Image.fromarray(stored), icc_profile=colour_profiles.grey_profile(1.8))

    assert difference(decode(data), colour_profiles.grey_in_srgb(levels, 1.8)) <= 1


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_the_inks_of_a_cmyk_profile_are_applied(kind: str) -> None:
    # In Lab, 8 bits each: a cyan and a black that no formula guesses.
    paper = (255, 128, 128)
    cyan = (140, 91, 78)
    black = (41, 128, 128)
    corners = [paper] * 16
    for combination in range(16):
        if combination & 8:
            corners[combination] = cyan
        if combination & 1:
            corners[combination] = black
    profile = colour_profiles.cmyk_profile(corners)
    settings = {"quality": 100} if kind == "JPEG" else {}
    inks = {(0, 0, 0, 0): paper, (255, 0, 0, 0): cyan, (0, 0, 0, 255): black}
    for ink, (lightness, a, b) in inks.items():
        picture = Image.new("CMYK", (16, 16), ink)

        shown = decode(saved(picture, kind, icc_profile=profile, **settings))

        expected = colour_profiles.lab_in_srgb(lightness / 2.55, a - 128, b - 128)
        assert difference(shown, np.broadcast_to(expected, (16, 16, 3))) <= 1, ink


def test_transparent_areas_are_white_whatever_the_profile() -> None:
    picture = scene()
    picture.putalpha(Image.new("L", picture.size, 0))
    shown = decode(saved(picture, icc_profile=P3))

    assert difference(shown, np.full((*picture.size[::-1], 3), 255, np.uint8)) == 0


@pytest.mark.parametrize("mode", ["RGBA", "P", "LA"])
def test_every_mode_of_a_picture_is_converted(mode: str) -> None:
    profile = colour_profiles.grey_profile(1.8) if mode == "LA" else P3
    picture = scene().convert(mode)
    plain = np.asarray(picture.convert("L" if mode == "LA" else "RGB"))
    expected = colour_profiles.grey_in_srgb(plain, 1.8)
    if mode != "LA":
        expected = colour_profiles.rgb_in_srgb(plain, colour_profiles.DISPLAY_P3, 2.2)

    assert difference(decode(saved(picture, icc_profile=profile)), expected) <= 1


def test_a_profile_that_is_srgb_changes_nothing(tmp_path: Path) -> None:
    picture = photo(tmp_path)
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    data = saved(picture, icc_profile=srgb)

    assert difference(decode(data), np.asarray(picture)) == 0
    assert inspect(data).conversions == ()


@pytest.mark.parametrize(
    ("mode", "profile"), [("L", P3), ("RGB", colour_profiles.grey_profile(1.8))]
)
def test_a_profile_for_other_colours_is_ignored(mode: str, profile: bytes) -> None:
    picture = scene().convert(mode)
    data = saved(picture, icc_profile=profile)

    assert difference(decode(data), np.asarray(picture.convert("RGB"))) == 0
    assert inspect(data).conversions == ()


@pytest.mark.parametrize("read", [inspect, decode])
@pytest.mark.parametrize("profile", [b"no profile", P3[:200], P3.replace(b"acsp", b"xxxx")])
def test_a_broken_profile_leaves_out_the_picture(
    profile: bytes, read: Callable[[bytes], object]
) -> None:
    data = saved(scene(), icc_profile=profile)

    with pytest.raises(UnsuitableError, match=r"broken colour profile.*convert the file to sRGB"):
        read(data)


def with_nclx(data: bytes, primaries: int, curve: int) -> bytes:
    """An AVIF or HEIC with other colour codes."""
    place = data.index(b"colrnclx") + 8
    return data[:place] + struct.pack(">HH", primaries, curve) + data[place + 4 :]


def with_cicp(data: bytes, primaries: int, curve: int) -> bytes:
    """A PNG with colour codes, in a chunk after the first one (8 + 25 bytes)."""
    content = b"cICP" + bytes([primaries, curve, 0, 1])
    chunk = struct.pack(">I", 4) + content + zlib.crc32(content).to_bytes(4, "big")
    return data[:33] + chunk + data[33:]


CURVES = {"PQ": 16, "HLG": 18}


def hdr_picture(kind: str, curve: str) -> bytes:
    """A picture that declares a curve of HDR in one of several ways."""
    number = CURVES[curve]
    if kind == "PNG":
        return with_cicp(saved(scene()), 9, number)
    if kind in ("AVIF", "HEIF"):
        return with_nclx(saved(scene(), kind), 9, number)
    settings: dict[str, Any] = {"name": f"Rec. ITU-R BT.2100 {curve}"}
    if kind == "profile codes":
        settings = {"cicp": bytes([9, number, 0, 1])}
    profile = colour_profiles.rgb_profile(colour_profiles.DISPLAY_P3, 2.2, **settings)
    return saved(scene(), icc_profile=profile)


@pytest.mark.parametrize("read", [inspect, decode])
@pytest.mark.parametrize("kind", ["AVIF", "HEIF", "PNG", "profile name", "profile codes"])
@pytest.mark.parametrize("curve", CURVES)
def test_hdr_pictures_are_refused_as_clips_are(
    curve: str, kind: str, read: Callable[[bytes], object]
) -> None:
    data = hdr_picture(kind, curve)
    reason = rf"^is HDR \({curve}\), which 8-bit pictures cannot represent"

    with pytest.raises(UnsuitableError, match=reason):
        read(data)


def test_wide_colours_without_a_profile_are_refused() -> None:
    with pytest.raises(UnsuitableError, match=r"in wide colours \(BT.2020\)"):
        inspect(with_cicp(saved(scene()), 9, 1))


@pytest.mark.parametrize("kind", ["AVIF", "PNG"])
def test_the_number_of_display_p3_is_applied_as_its_profile(kind: str) -> None:
    settings = {"quality": 100, "subsampling": "4:4:4"} if kind == "AVIF" else {}
    data = saved(scene(), kind, **settings)
    stored = np.asarray(decode(data))
    expected = colour_profiles.rgb_in_srgb(stored, colour_profiles.DISPLAY_P3, None)

    numbered = with_cicp(data, 12, 13) if kind == "PNG" else with_nclx(data, 12, 13)

    assert difference(decode(numbered), expected) <= 1
    assert inspect(numbered).conversions == ("converted to sRGB",)


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_codes_of_sdr_are_read(kind: str) -> None:
    assert inspect(with_nclx(saved(scene(), kind), 1, 13)).conversions == ()
