"""Picture files as people have them, whole and broken, made on the fly.

Every whole file shows `scene()`: four quadrants of different colour, so that a test sees rotation,
colour and transparency at once. `WHOLE` and `BROKEN` are the two collections, by file name.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin
from skimage import data as photographs

WIDTH = 96
HEIGHT = 64
RED = (200, 30, 30)
GREEN = (30, 180, 40)
BLUE = (40, 50, 200)
WHITE = (255, 255, 255)
ORIENTATION = 0x0112
RAW_PROFILE = "Raw profile type exif"
# How to turn an upright picture so that a viewer that honours this EXIF number turns it back.
TURNED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
# Options of `save` by which the colours stay close to those of the scene.
BEST_QUALITY: dict[str, dict[str, object]] = {
    ".jpg": {"quality": 95, "subsampling": 0},
    ".webp": {"lossless": True},
    ".avif": {"quality": 95},
    ".heic": {"quality": 95},
}
SOURCES = (photographs.astronaut, photographs.coffee, photographs.chelsea, photographs.rocket)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

Writer = Callable[[Path], None]


def scene(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Red, green, blue and white quadrants, from the top left as one reads."""
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    pixels[height // 2 :, width // 2 :] = WHITE
    return Image.fromarray(pixels)


def corners(picture: Image.Image) -> list[tuple[int, ...]]:
    """Colours in the middle of the four quadrants, in the order of `scene`."""
    width, height = picture.size
    points = [(x, y) for y in (height // 4, 3 * height // 4) for x in (width // 4, 3 * width // 4)]
    # A grey picture gives a number in place of a tuple.
    return [tuple(np.atleast_1d(picture.getpixel(point)).tolist()) for point in points]


def photograph(path: Path, size: tuple[int, int], seed: int = 0) -> None:
    """Save a part of a real photograph in any size; the seed chooses which."""
    source = _source(seed % len(SOURCES))
    # A part of three quarters of each side leaves a quarter to move it in; the two factors are
    # primes, so that parts of successive seeds lie in different places.
    left = seed * 37 % (source.width // 4)
    top = seed * 53 % (source.height // 4)
    part = source.crop((left, top, left + source.width * 3 // 4, top + source.height * 3 // 4))
    path.parent.mkdir(parents=True, exist_ok=True)
    part.resize(size, Image.Resampling.BICUBIC).save(path)


@functools.cache
def _source(number: int) -> Image.Image:
    read_pixels = SOURCES[number]
    return Image.fromarray(read_pixels())


def rotated(path: Path, orientation: int) -> None:
    """Save the scene turned, with the EXIF number by which a viewer turns it back."""
    stored = scene()
    turn = TURNED[orientation]
    if turn is not None:
        stored = stored.transpose(turn)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    stored.save(path, exif=exif.tobytes(), **BEST_QUALITY.get(path.suffix, {}))


def late_exif_png(path: Path) -> None:
    """A PNG whose EXIF data comes after the pixels."""
    rotated(path, orientation=6)
    content = path.read_bytes()
    # A chunk is its length, its type, its data and a checksum: 4 + 4 + length + 4 bytes.
    start = content.index(b"eXIf") - 4
    (length,) = struct.unpack(">I", content[start : start + 4])
    exif_chunk = content[start : start + 12 + length]
    without_exif = content[:start] + content[start + 12 + length :]
    end_chunk = without_exif[without_exif.index(b"IEND") - 4 :]
    path.write_bytes(without_exif.removesuffix(end_chunk) + exif_chunk + end_chunk)


def raw_profile_png(path: Path, kind: str) -> None:
    """A PNG turned by EXIF data in a chunk of text, as ImageMagick wrote it.

    Args:
        kind: of the chunk: `tEXt`, `zTXt` or `iTXt`.
    """
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    data = exif.tobytes()
    text = f"\nexif\n{len(data):8}\n{data.hex()}\n"
    info = PngImagePlugin.PngInfo()
    if kind == "iTXt":
        info.add_itxt(RAW_PROFILE, text)
    else:
        info.add_text(RAW_PROFILE, text, zip=kind == "zTXt")
    turn = TURNED[6]
    assert turn is not None
    scene().transpose(turn).save(path, pnginfo=info)


def _alpha() -> Image.Image:
    """Opaque, but fully transparent in the white quadrant."""
    alpha = np.full((HEIGHT, WIDTH), 255, dtype=np.uint8)
    alpha[HEIGHT // 2 :, WIDTH // 2 :] = 0
    return Image.fromarray(alpha)


def _transparent(mode: str) -> Image.Image:
    """The scene without its white quadrant; the invisible pixels are black."""
    picture = scene()
    picture.paste((0, 0, 0), (WIDTH // 2, HEIGHT // 2, WIDTH, HEIGHT))
    picture = picture.convert(mode)
    picture.putalpha(_alpha())
    return picture


def transparent_palette(path: Path) -> None:
    """The entry of white in the palette is black, and declared transparent."""
    picture = scene().quantize(8)
    white = picture.getpixel((WIDTH - 1, HEIGHT - 1))
    palette = picture.getpalette() or []
    palette[3 * white : 3 * white + 3] = [0, 0, 0]
    picture.putpalette(palette)
    picture.save(path, transparency=white)


def transparent_colour(path: Path, mode: str) -> None:
    """Black is declared transparent, without an alpha channel."""
    picture = _transparent("RGB").convert("RGB").convert(mode)
    black = {"RGB": (0, 0, 0), "L": 0}[mode]
    picture.save(path, transparency=black)


def deep_grey(path: Path, dtype: str = "uint16", top: float = 65535) -> None:
    """The brightness of the scene in more than 8 bits per pixel; white is `top`."""
    grey = np.asarray(scene().convert("L"), dtype=np.float64) / 255 * top
    Image.fromarray(grey.astype(dtype)).save(path)


def animated_webp(path: Path) -> None:
    """An animation that begins with the scene."""
    later_frames = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("black", "yellow")]
    scene().save(path, save_all=True, append_images=later_frames, lossless=True, duration=100)


def with_text(path: Path) -> None:
    """A PNG with the kind of metadata that picture generators add."""
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", "a red house, steps: 30")
    info.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta><rdf:RDF/></x:xmpmeta>", zip=True)
    scene().save(path, pnginfo=info)


def jpeg_with_trailer(path: Path) -> None:
    """A JPEG with a phone's own data appended after the end of the picture."""
    scene().save(path, quality=95, subsampling=0)
    path.write_bytes(path.read_bytes() + b"MotionPhoto_Data" + bytes(300))


WHOLE: dict[str, Writer] = {
    "plain.jpg": lambda path: scene().save(path, quality=95, subsampling=0),
    "PLAIN.JPEG": lambda path: scene().save(path, quality=95, subsampling=0),
    "progressive.jpg": lambda path: scene().save(path, quality=95, subsampling=0, progressive=True),
    "cmyk.jpg": lambda path: scene().convert("CMYK").save(path, quality=98, subsampling=0),
    "trailer.jpg": jpeg_with_trailer,
    "plain.png": lambda path: scene().save(path),
    "interlaced.png": lambda path: scene().save(path, interlace=1),
    "text.png": with_text,
    "palette.png": lambda path: scene().quantize(8).save(path),
    "palette-transparency.png": transparent_palette,
    "rgba.png": lambda path: _transparent("RGB").save(path),
    "rgb-transparency.png": lambda path: transparent_colour(path, "RGB"),
    "plain.webp": lambda path: scene().save(path, lossless=True),
    "rgba.webp": lambda path: _transparent("RGB").save(path, lossless=True),
    "animated.webp": animated_webp,
    "plain.bmp": lambda path: scene().save(path),
    "plain.tif": lambda path: scene().save(path),
    "lzw.tiff": lambda path: scene().save(path, compression="tiff_lzw"),
    "cmyk.tif": lambda path: scene().convert("CMYK").save(path),
}
# Files without colour; they show the brightness of the scene.
GREY: dict[str, Writer] = {
    "grey.jpg": lambda path: scene().convert("L").save(path, quality=95),
    "grey.png": lambda path: scene().convert("L").save(path),
    "grey-alpha.png": lambda path: _transparent("L").save(path),
    "grey-transparency.png": lambda path: transparent_colour(path, "L"),
    "grey16.png": deep_grey,
    "grey16.tif": deep_grey,
    "grey16-big-endian.tif": lambda path: deep_grey(path, ">u2"),
    "grey32.tif": lambda path: deep_grey(path, "int32"),
    "grey-float.tif": lambda path: deep_grey(path, "float32", 1.0),
}


def _bytes(content: bytes) -> Writer:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def _without_end(count: int) -> Writer:
    """A picture that lacks only its end marker of `count` bytes."""

    def write(path: Path) -> None:
        scene().save(path)
        path.write_bytes(path.read_bytes()[:-count])

    return write


def _cut(suffix: str, share: float) -> Writer:
    """A picture that ends early, as after a broken download or on a full disk."""

    def write(path: Path) -> None:
        photo = Image.fromarray(photographs.chelsea())
        memory = io.BytesIO()
        photo.save(memory, format=Image.registered_extensions()[suffix])
        content = memory.getvalue()
        path.write_bytes(content[: int(len(content) * share)])

    return write


def _garbage_png(path: Path) -> None:
    """Chunks and checksums are right, but the compressed pixels are garbage."""
    _damaged_png(path)
    content = path.read_bytes()
    position = len(PNG_SIGNATURE)
    chunks = [content[:position]]
    while position < len(content):
        length = content[position : position + 4]
        type_end = position + 8
        data_end = type_end + int.from_bytes(length, "big")
        body = content[position + 4 : data_end]
        chunks += [length, body, zlib.crc32(body).to_bytes(4, "big")]
        position = data_end + 4
    path.write_bytes(b"".join(chunks))


def _damaged_png(path: Path) -> None:
    """Chunks are where they belong, but some bytes of the pixels were lost."""
    Image.fromarray(photographs.chelsea()).save(path)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(bytes(content))


# Refused without decoding the whole picture.
BROKEN: dict[str, Writer] = {
    "damaged.png": _damaged_png,
    "half.webp": _cut(".webp", 0.6),
    "empty.png": _bytes(b""),
    "text.png": _bytes(b"not a picture at all"),
    "page.jpg": _bytes(b"<html>404</html>"),
    "only-magic.jpg": _bytes(b"\xff\xd8\xff\xe0"),
    "only-magic.png": _bytes(PNG_SIGNATURE),
    "no-iend.png": _without_end(12),
    "no-eoi.jpg": _without_end(2),
    "phone.jpg": _bytes(b"\0\0\0\x18ftypheic" + bytes(64)),
    "cut.jpg": _cut(".jpg", 0.6),
    "cut.png": _cut(".png", 0.6),
}
# Refused only by decoding.
DAMAGED_INSIDE: dict[str, Writer] = {
    "garbage.png": _garbage_png,
    "cut.bmp": _cut(".bmp", 0.6),
    "cut.tif": _cut(".tif", 0.6),
}


def write_all(folder: Path, collection: dict[str, Writer]) -> list[Path]:
    """Write a collection into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in collection.items():
        write(folder / name)
    return [folder / name for name in collection]
