"""No file ends a run for all others, and only a file that is proved damaged is called damaged."""

from __future__ import annotations

import errno
import io
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from simpletuner.data import clip_facts, clip_frames, clips, flatten
from simpletuner.data.decode_memory import BYTES_PER_PIXEL, DecodeMemory
from simpletuner.data.files import DeviceError, MediaError, UnsuitableError
from simpletuner.data.heif_boxes import shown_properties
from simpletuner.data.pictures import decode, inspect, probe
from tests.tools.pictures import HEIGHT, ORIENTATION, RED, WIDTH, corners, scene

pillow_heif.register_heif_opener()  # to write such files


def saved(picture: Image.Image, kind: str, **settings: object) -> bytes:
    memory = io.BytesIO()
    picture.save(memory, kind, **settings)
    return memory.getvalue()


def float_tiff() -> bytes:
    """Three floats per pixel, as renderers write them."""
    short = 3
    long = 4
    # (tag, type, value): size, bits, compression, photometric, offset of the strip, samples, rows,
    # bytes of the strip, format.
    entries = [
        (256, short, 2),
        (257, short, 2),
        (258, short, 32),
        (259, short, 1),
        (262, short, 2),
        (273, long, 200),
        (277, short, 3),
        (278, short, 2),
        (279, long, 48),
        (339, short, 3),
    ]
    data = b"II*\0" + struct.pack("<IH", 8, len(entries))
    for tag, kind, value in entries:
        data += struct.pack("<HHII", tag, kind, 1, value)
    return data.ljust(200, b"\0") + np.full(12, 0.5, "<f4").tobytes()


def fields_bmp() -> bytes:
    """32 bits per pixel with five bits for each colour."""
    size = struct.pack("<IiiHHIIiiII", 40, 2, 2, 1, 32, 3, 16, 0, 0, 0, 0)
    masks = struct.pack("<III", 0x7C00, 0x3E0, 0x1F)
    return b"BM" + struct.pack("<IHHI", 82, 0, 0, 66) + size + masks + bytes(16)


def deep_jpeg() -> bytes:
    """12 bits per colour, as medical scanners write them."""
    data = bytearray(saved(scene(), "JPEG"))
    data[data.index(b"\xff\xc0") + 4] = 12
    return bytes(data)


def uncommon_tiff() -> bytes:
    """Compressed in a way that libtiff is rarely built with."""
    data = bytearray(saved(scene(), "TIFF", compression="tiff_lzw"))
    place = data.index(struct.pack("<HHI", 259, 3, 1))  # the tag of the compression
    data[place + 8 : place + 10] = struct.pack("<H", 50001)  # WebP
    return bytes(data)


INTACT: dict[str, Callable[[], bytes]] = {
    "floats.tif": float_tiff,
    "fields.bmp": fields_bmp,
    "deep.jpg": deep_jpeg,
    "webp.tif": uncommon_tiff,
    "jpeg-xl.png": lambda: b"\xff\x0a" + bytes(99),
    "jpeg-2000.jpg": lambda: b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(99),
    "photoshop.png": lambda: b"8BPS" + bytes(99),
    "newer.avif": lambda: b"\0\0\0\x10ftypmif3avif" + bytes(99),
    "coded.heif": lambda: b"\0\0\0\x10ftypjpeg" + bytes(99),
}


@pytest.mark.parametrize("name", INTACT)
def test_an_intact_file_of_an_unsupported_kind_is_unsuitable(name: str) -> None:
    data = INTACT[name]()
    with pytest.raises(UnsuitableError):
        decode(data)


@pytest.mark.parametrize("kind", ["AVIF", "HEIF"])
def test_a_cut_container_is_truncated(kind: str) -> None:
    data = saved(scene(), kind)
    with pytest.raises(MediaError, match="is truncated") as error:
        probe(data[:-10])
    assert error.value.reason == "damaged"


# What a decoder may raise without documenting it.
ODD = [
    RuntimeError("odd"),
    KeyError("odd"),
    AttributeError("odd"),
    AssertionError("odd"),
    RecursionError("odd"),
]
# Errors that are not the fault of the file.
OURS = [
    MemoryError(),
    OSError(errno.EMFILE, "odd"),
    RuntimeError("can't start new thread"),
    DeviceError("odd"),
]


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **settings: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("method", ["open", "load"])
def test_an_unexpected_error_leaves_out_the_picture(
    method: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = saved(scene(), "PNG")
    place = Image if method == "open" else ImageFile.ImageFile
    monkeypatch.setattr(place, method, raising(error))

    with pytest.raises(UnsuitableError, match=r"cannot be decoded: .*odd"):
        decode(data)


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_an_unexpected_error_leaves_out_the_clip_when_it_is_probed(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip_facts, "read_facts", raising(error))

    with pytest.raises(UnsuitableError, match=r"cannot be decoded: .*odd"):
        clips.probe_clip(Path("a.mp4"))


@pytest.mark.parametrize("error", ODD, ids=lambda error: type(error).__name__)
def test_an_unexpected_error_leaves_out_the_clip_when_it_is_decoded(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def frames(*arguments: Any) -> Iterator[Any]:
        yield Image.new("RGB", (4, 4))
        raise error

    monkeypatch.setattr(clip_frames, "read_with_av", frames)
    facts = clips.ClipFacts(4, 4, 1.0, 24.0)

    with pytest.raises(UnsuitableError, match=r"cannot be decoded: .*odd"):
        list(clips.frames_of(Path("a.mp4"), 5, 24, facts))


@pytest.mark.parametrize("error", OURS, ids=lambda error: type(error).__name__)
def test_an_error_of_the_machine_is_not_blamed_on_a_file(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", raising(error))
    with pytest.raises(type(error)):
        decode(saved(scene(), "PNG"))

    monkeypatch.setattr(clip_facts, "read_facts", raising(error))
    with pytest.raises(type(error)):
        clips.probe_clip(Path("a.mp4"))


def with_aperture(
    data: bytes, width: int, height: int, right: int, down: int, parts: int = 1
) -> bytes:
    """An AVIF with a clean aperture, in whole pixels or in parts of pixels.

    The description with the new property comes last, so that no offset in the file changes.
    """
    # The box `meta`, and in it the properties (`ipco`) and which item has which (`ipma`).
    start = data.index(b"meta") - 4
    meta = data[start : start + size_at(data, start)]
    container = meta.index(b"ipco") - 4
    container_end = container + size_at(meta, container)
    association = bytearray(meta[meta.index(b"ipma") - 4 :])

    numbers = (width, parts, height, parts, right, parts, down, parts)
    aperture = struct.pack(">I4sIIIIiIiI", 40, b"clap", *numbers)
    count = sum(1 for _ in media_boxes(meta[container + 8 : container_end]))
    association[18] += 1  # number of properties, after size, type, version, number of items and id
    length = size_at(association, 0)
    association[length:length] = bytes([0x80 | count + 1])
    struct.pack_into(">I", association, 0, length + 1)

    inner = bytearray(meta[:container_end] + aperture + association)
    added = len(aperture) + 1
    struct.pack_into(">I", inner, container, size_at(meta, container) + len(aperture))
    for box in (0, inner.index(b"iprp") - 4):
        struct.pack_into(">I", inner, box, size_at(inner, box) + added)
    return data[: start + 4] + b"free" + data[start + 8 :] + bytes(inner)


def size_at(data: bytes | bytearray, position: int) -> int:
    """The size of the box at a position."""
    (size,) = struct.unpack_from(">I", data, position)
    return size


def media_boxes(data: bytes) -> Iterator[bytes]:
    """The types of boxes that follow each other."""
    position = 0
    while position < len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        yield kind
        position += size


def test_the_clean_aperture_of_an_avif_is_obeyed() -> None:
    # The middle of the aperture is left and above of the picture's.
    data = with_aperture(saved(scene(), "AVIF", quality=95), 40, 20, -20, -16)

    shown = decode(data)

    assert probe(data) == (40, 20)
    assert shown.size == (40, 20)
    assert np.abs(np.asarray(shown).mean(axis=(0, 1)) - RED).max() < 8
    assert inspect(data).conversions == ("cropped to its clean aperture",)


@pytest.mark.parametrize("aperture", [(40, 20, 60, 0, 1), (81, 40, 1, 0, 2), (0, 0, 0, 0, 1)])
def test_a_picture_whose_aperture_cannot_be_applied_is_left_out(
    aperture: tuple[int, int, int, int, int],
) -> None:
    data = with_aperture(saved(scene(), "AVIF"), *aperture)
    with pytest.raises(UnsuitableError, match="clean aperture"):
        inspect(data)


def test_damaged_boxes_have_no_properties() -> None:
    data = saved(scene(), "AVIF")
    for length in range(0, len(data), 7):
        assert shown_properties(data[:length]) is not None


XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "TIFF", "PNG", "AVIF"])
def test_an_orientation_in_xmp_turns_nothing(kind: str) -> None:
    settings: dict[str, Any] = {"xmp": XMP}
    if kind == "PNG":
        texts = PngImagePlugin.PngInfo()
        texts.add_itxt("XML:com.adobe.xmp", XMP.decode())
        settings = {"pnginfo": texts}
    if kind == "TIFF":
        settings = {"tiffinfo": {700: XMP}}
    data = saved(scene(), kind, **settings)

    assert b"tiff:Orientation" in data
    assert probe(data) == (WIDTH, HEIGHT)
    assert decode(data).size == (WIDTH, HEIGHT)
    assert inspect(data).conversions == ("turned by EXIF alone",)


def test_exif_counts_where_xmp_contradicts_it() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 3
    data = saved(scene(), "JPEG", xmp=XMP, exif=exif)

    assert corners(decode(data))[3][0] > 150, "red is at the bottom right"
    assert inspect(data).conversions == ()


@pytest.mark.parametrize(("background", "level"), [("white", 255), ("black", 0)])
def test_a_transparent_level_of_deep_grey_shows_the_background(background: str, level: int) -> None:
    values = np.array([[1000, 30000, 65535]], dtype=np.uint16)
    data = saved(Image.fromarray(values), "PNG", transparency=1000)

    assert np.asarray(decode(data, background))[0, :, 0].tolist() == [level, 117, 255]
    assert inspect(data).conversions == ("shown on white",)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "I;16", "F", "CMYK", "1"])
def test_a_picture_converted_in_strips_equals_one_converted_whole(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = scene().convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        picture = Image.fromarray(np.arange(64 * 96, dtype=np.uint16).reshape(64, 96))
    if mode in ("RGBA", "LA"):
        picture.putalpha(Image.linear_gradient("L").resize(picture.size))
    at_once = flatten.flatten(picture.copy(), "white", None)
    monkeypatch.setattr(flatten, "STRIP_PIXELS", 7 * WIDTH)

    in_strips = flatten.flatten(picture, "white", None)

    assert np.array_equal(in_strips, at_once)


def test_threads_share_the_memory_for_pixels() -> None:
    memory = DecodeMemory(100 * BYTES_PER_PIXEL)
    lock = threading.Lock()
    held = 0
    most = 0

    def decode_picture(number: int) -> None:
        nonlocal held, most
        size = (number % 7 + 1, 10)
        pixels = size[0] * size[1]
        # The inner reservation is part of the outer one.
        with memory.reserved(size), memory.reserved(size):
            with lock:
                held += pixels
                most = max(most, held)
            time.sleep(0.001)
            with lock:
                held -= pixels

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(decode_picture, range(100)))

    assert 70 < most <= 100


def test_a_picture_larger_than_the_memory_is_decoded_alone() -> None:
    memory = DecodeMemory(100 * BYTES_PER_PIXEL)

    with memory.reserved((1000, 1000)):
        pass


def test_nothing_is_printed_about_a_damaged_tiff(capfd: pytest.CaptureFixture[str]) -> None:
    data = bytearray(saved(scene(), "TIFF", compression="tiff_lzw"))
    data[20:400] = bytes(380)

    for damaged in (bytes(data), uncommon_tiff()):
        with pytest.raises(MediaError):
            decode(damaged)

    assert capfd.readouterr().err == ""
