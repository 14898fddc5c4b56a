"""Pictures: whole ones are read as they are shown, and broken ones are found."""

from __future__ import annotations

import errno
import random
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from simpletuner.config.types import Size
from simpletuner.data import picture_formats
from simpletuner.data.buckets import Geometry
from simpletuner.data.files import UnreadableError, UnsuitableError
from simpletuner.data.pictures import PICTURE_SUFFIXES, MediaError, decode, fit, probe
from tests.tools import pictures
from tests.tools.pictures import (
    BLUE,
    BROKEN,
    DAMAGED_INSIDE,
    GREEN,
    GREY,
    HEIGHT,
    RED,
    WHITE,
    WHOLE,
    WIDTH,
    corners,
    scene,
)

pillow_heif.register_heif_opener()  # to write such files


def assert_colours(picture: Image.Image, expected: list[tuple[int, ...]], tolerance: int) -> None:
    for colour, expected_colour in zip(corners(picture), expected, strict=True):
        assert np.abs(np.subtract(colour, expected_colour)).max() <= tolerance


@pytest.mark.parametrize("name", WHOLE)
def test_whole_pictures_show_the_scene(name: str, tmp_path: Path) -> None:
    WHOLE[name](tmp_path / name)
    tolerance = 6 if name.endswith(("jpg", "JPEG")) else 0

    picture = decode(tmp_path / name)

    assert probe(tmp_path / name) == (WIDTH, HEIGHT)
    assert picture.mode == "RGB"
    assert picture.size == (WIDTH, HEIGHT)

    assert_colours(picture, [RED, GREEN, BLUE, WHITE], tolerance)


@pytest.mark.parametrize("name", GREY)
def test_grey_pictures_show_its_brightness(name: str, tmp_path: Path) -> None:
    GREY[name](tmp_path / name)
    tolerance = 3 if name.endswith("jpg") else 1

    picture = decode(tmp_path / name)

    assert probe(tmp_path / name) == (WIDTH, HEIGHT)

    assert_colours(picture, corners(scene().convert("L").convert("RGB")), tolerance)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)
    Image.fromarray(np.tile(ramp, (8, 1))).save(tmp_path / "ramp.png")

    assert np.array_equal(np.asarray(decode(tmp_path / "ramp.png"))[0, :, 0], np.arange(256))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif", ".avif", ".heic"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_applied(orientation: int, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"turned{suffix}"
    pictures.rotated(path, orientation)

    picture = decode(path)

    assert probe(path) == (WIDTH, HEIGHT)
    assert picture.size == (WIDTH, HEIGHT)

    assert_colours(picture, [RED, GREEN, BLUE, WHITE], 6)


def test_exif_behind_the_pixels_of_a_png_counts(tmp_path: Path) -> None:
    path = tmp_path / "late.png"
    pictures.late_exif_png(path)

    assert probe(path) == (WIDTH, HEIGHT)
    assert decode(path).size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("kind", ["tEXt", "zTXt", "iTXt"])
def test_exif_in_a_text_of_a_png_counts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "text.png"
    pictures.raw_profile_png(path, kind)

    assert kind.encode() in path.read_bytes()
    assert probe(path) == (WIDTH, HEIGHT)
    assert_colours(decode(path), [RED, GREEN, BLUE, WHITE], 6)


@pytest.mark.parametrize("comment", ["a holiday", "Raw profile type icc"])
def test_other_texts_of_a_png_turn_nothing(comment: str, tmp_path: Path) -> None:
    info = PngInfo()
    info.add_text(comment, "x")
    scene().save(tmp_path / "text.png", pnginfo=info)

    data = (tmp_path / "text.png").read_bytes()

    assert not picture_formats.png_has_orientation(data)
    assert probe(tmp_path / "text.png") == (WIDTH, HEIGHT)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_a_picture_with_broken_exif_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    scene().save(path, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\xff")

    assert probe(path) == (WIDTH, HEIGHT)
    assert decode(path).size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_found_without_decoding(name: str, tmp_path: Path) -> None:
    BROKEN[name](tmp_path / name)

    with pytest.raises(MediaError) as probed:
        probe(tmp_path / name)
    with pytest.raises(MediaError):
        decode(tmp_path / name)

    is_truncated = name.startswith(("cut", "no-"))
    assert "only-magic" in name or is_truncated == ("truncated" in str(probed.value))


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".bmp", ".tif"])
def test_a_cut_anywhere_is_detected(suffix: str, tmp_path: Path) -> None:
    pictures.photograph(tmp_path / f"whole{suffix}", (120, 80))
    content = (tmp_path / f"whole{suffix}").read_bytes()
    path = tmp_path / f"cut{suffix}"
    read = probe if suffix in (".jpg", ".png") else decode
    step = max(1, len(content) // 40)
    for length in {*range(0, len(content), step), len(content) - 1}:
        path.write_bytes(content[:length])
        with pytest.raises(MediaError):
            read(path)


def test_damage_inside_is_found_by_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)  # as other packages leave it
    for path in pictures.write_all(tmp_path, DAMAGED_INSIDE):
        probe(path)
        with pytest.raises(MediaError):
            decode(path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    numbers = random.Random(0)
    for name, write in {**WHOLE, **GREY}.items():
        path = tmp_path / name
        write(path)
        content = path.read_bytes()
        for _ in range(25):
            damaged = bytearray(content)
            for _ in range(numbers.choice((1, 8, 64))):
                position = numbers.randrange(min(len(damaged), numbers.choice((64, 4096))))
                damaged[position] = numbers.randrange(256)
            path.write_bytes(bytes(damaged))
            with suppress(MediaError):
                size = probe(path)
                assert decode(path).size == size


def test_a_picture_without_pixels_is_damaged(tmp_path: Path) -> None:
    scene().save(tmp_path / "a.bmp")
    content = bytearray((tmp_path / "a.bmp").read_bytes())
    content[18:22] = bytes(4)  # the width
    (tmp_path / "a.bmp").write_bytes(bytes(content))

    with pytest.raises(MediaError):
        probe(tmp_path / "a.bmp")


@pytest.mark.parametrize(
    ("suffix", "remedy"), [(".heic", "pillow-heif>=0.22"), (".avif", "pillow>=11.3")]
)
def test_a_missing_reader_is_not_blamed_on_the_file(
    suffix: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"phone{suffix}"
    scene().save(path)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr(picture_formats.features, "check", lambda name: False)
    picture_formats.reader_problem.cache_clear()
    try:
        with pytest.raises(UnreadableError, match=f"pip install .*{remedy}"):
            probe(path)
    finally:
        picture_formats.reader_problem.cache_clear()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), MemoryError),
        (OSError("out of memory error when reading image file"), MemoryError),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), OSError),
        (OSError(errno.EMFILE, "Too many open files"), OSError),
    ],
)
def test_exhausted_resources_are_not_blamed_on_the_file(
    error: Exception, expected: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene().save(tmp_path / "a.png")

    def load(picture: Image.Image) -> None:
        raise error

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)

    with pytest.raises(expected):
        decode(tmp_path / "a.png")


def test_a_missing_file_is_a_media_error(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="cannot be read"):
        probe(tmp_path / "gone.png")


def test_a_picture_of_too_many_pixels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene().save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)

    with pytest.raises(UnsuitableError, match="too many pixels"):
        probe(tmp_path / "a.png")


def test_fit_equals_resizing_and_cropping(tmp_path: Path) -> None:
    pictures.photograph(tmp_path / "a.png", (371, 250), seed=1)
    picture = decode(tmp_path / "a.png")
    geometry = Geometry("1.5", Size(96, 64), Size(104, 70), (5, 3))
    plain = picture.resize((104, 70), Image.Resampling.LANCZOS).crop((5, 3, 101, 67))
    pixels = fit(picture, geometry)

    assert pixels.shape == (64, 96, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(pixels.astype(int) - np.asarray(plain)).max() <= 1


def test_fit_without_a_change_returns_the_pixels() -> None:
    picture = scene()
    geometry = Geometry("1.5", picture.size, picture.size, (0, 0))

    assert np.array_equal(fit(picture, geometry), np.asarray(picture))


def test_fit_is_antialiased() -> None:
    stripes = np.zeros((64, 64, 3), dtype=np.uint8)
    stripes[:, ::2] = 255
    pixels = fit(Image.fromarray(stripes), Geometry("1.0", Size(16, 16), Size(16, 16), (0, 0)))

    assert np.abs(pixels[:, 2:-2].astype(int) - 128).max() <= 2


def test_a_very_long_picture_needs_little_memory() -> None:
    strip = Image.new("RGB", (20000, 2), "red")
    pixels = fit(strip, Geometry("1.0", Size(512, 512), Size(5120000, 512), (2000000, 0)))

    assert pixels.shape == (512, 512, 3)


def test_suffixes_are_those_of_the_specification() -> None:
    known = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif"}
    # Written by Windows, browsers, stereo cameras, and cameras of Sony and Canon.
    known |= {".jpe", ".jfif", ".mpo", ".hif"}

    assert known == PICTURE_SUFFIXES
