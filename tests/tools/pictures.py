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
# How to turn an upright picture so that the orientation of that number turns it back.
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
    places = [(width // 4, height // 4), (3 * width // 4, height // 4)]
    places += [(x, 3 * height // 4) for x, _ in places]
    return [tuple(np.atleast_1d(picture.getpixel(place)).tolist()) for place in places]


def photograph(path: Path, size: tuple[int, int], seed: int = 0) -> None:
    """A part of a real photograph in any size; the seed chooses which photograph and which part."""
    source = _source(seed % 4)
    left = seed * 37 % (source.width // 4)
    top = seed * 53 % (source.height // 4)
    part = source.crop((left, top, left + source.width * 3 // 4, top + source.height * 3 // 4))
    path.parent.mkdir(parents=True, exist_ok=True)
    part.resize(size, Image.Resampling.BICUBIC).save(path)


@functools.cache
def _source(number: int) -> Image.Image:
    read = (photographs.astronaut, photographs.coffee, photographs.chelsea, photographs.rocket)[
        number
    ]
    return Image.fromarray(read())


def rotated(path: Path, orientation: int) -> None:
    """The scene stored turned, with the EXIF number that says how to turn it back."""
    turn = TURNED[orientation]
    stored = scene() if turn is None else scene().transpose(turn)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    quality = {"quality": 95, "subsampling": 0} if path.suffix == ".jpg" else {}
    if path.suffix == ".webp":
        quality = {"lossless": True}
    if path.suffix in (".avif", ".heic"):
        quality = {"quality": 95}
    stored.save(path, exif=exif.tobytes(), **quality)


def late_exif_png(path: Path) -> None:
    """A PNG whose EXIF data comes behind the pixels."""
    rotated(path, 6)
    content = path.read_bytes()
    start = content.index(b"eXIf") - 4
    (length,) = struct.unpack(">I", content[start : start + 4])
    chunk = content[start : start + 12 + length]
    end = content.index(b"IEND") - 4
    path.write_bytes(content[:start] + content[start + 12 + length : end] + chunk + content[end:])


def _alpha() -> Image.Image:
    """255, but nothing of the white quadrant, whose colour below is black."""
    alpha = np.full((HEIGHT, WIDTH), 255, dtype=np.uint8)
    alpha[HEIGHT // 2 :, WIDTH // 2 :] = 0
    return Image.fromarray(alpha)


def _transparent(mode: str) -> Image.Image:
    picture = scene()
    picture.paste((0, 0, 0), (WIDTH // 2, HEIGHT // 2, WIDTH, HEIGHT))
    picture = picture.convert(mode)
    picture.putalpha(_alpha())
    return picture


def transparent_palette(path: Path) -> None:
    picture = scene().quantize(8)
    clear = picture.getpixel((WIDTH - 1, HEIGHT - 1))
    picture.putpalette(
        [0 if i // 3 == clear else v for i, v in enumerate(picture.getpalette() or [])]
    )
    picture.save(path, transparency=clear)


def transparent_colour(path: Path, mode: str) -> None:
    """One colour declared transparent, without an alpha channel."""
    picture = _transparent("RGB").convert("RGB").convert(mode)
    picture.save(path, transparency=(0, 0, 0) if mode == "RGB" else 0)


def deep_grey(path: Path, dtype: str = "uint16", top: float = 65535) -> None:
    """The brightness of the scene with more than 8 bits a pixel."""
    grey = np.asarray(scene().convert("L"), dtype=np.float64) / 255 * top
    Image.fromarray(grey.astype(dtype)).save(path)


def animated_webp(path: Path) -> None:
    others = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("black", "yellow")]
    scene().save(path, save_all=True, append_images=others, lossless=True, duration=100)


def with_text(path: Path) -> None:
    """A PNG with the kind of metadata that picture generators add."""
    info = PngImagePlugin.PngInfo()
    info.add_text("parameters", "a red house, steps: 30")
    info.add_itxt("XML:com.adobe.xmp", "<x:xmpmeta><rdf:RDF/></x:xmpmeta>", zip=True)
    scene().save(path, pnginfo=info)


def jpeg_with_trailer(path: Path) -> None:
    """Phones append their own data behind the end of the picture."""
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
# The same without colour; they show the brightness of the scene.
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
    """A picture that lacks nothing but its end marker of so many bytes."""

    def write(path: Path) -> None:
        scene().save(path)
        path.write_bytes(path.read_bytes()[:-count])

    return write


def _cut(name: str, share: float) -> Writer:
    """A picture that a download or a full disk has cut off."""

    def write(path: Path) -> None:
        photo = Image.fromarray(photographs.chelsea())
        memory = io.BytesIO()
        photo.save(memory, format=Image.registered_extensions()[Path(name).suffix])
        content = memory.getvalue()
        path.write_bytes(content[: int(len(content) * share)])

    return write


def _garbage_png(path: Path) -> None:
    """Whole by its structure and its checksums, but the compressed data is garbage."""
    _damaged_png(path)
    content = path.read_bytes()
    position = 8
    chunks = [content[:8]]
    while position < len(content):
        length = int.from_bytes(content[position : position + 4], "big")
        body = content[position + 4 : position + 8 + length]
        chunks += [content[position : position + 4], body, zlib.crc32(body).to_bytes(4, "big")]
        position += 12 + length
    path.write_bytes(b"".join(chunks))


def _damaged_png(path: Path) -> None:
    """Whole by its structure, but some bytes of the pixels were lost."""
    Image.fromarray(photographs.chelsea()).save(path)
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(bytes(content))


BROKEN: dict[str, Writer] = {
    "damaged.png": _damaged_png,
    "half.webp": _cut("x.webp", 0.6),
    "empty.png": _bytes(b""),
    "text.png": _bytes(b"not a picture at all"),
    "page.jpg": _bytes(b"<html>404</html>"),
    "only-magic.jpg": _bytes(b"\xff\xd8\xff\xe0"),
    "only-magic.png": _bytes(b"\x89PNG\r\n\x1a\n"),
    "no-iend.png": _without_end(12),
    "no-eoi.jpg": _without_end(2),
    "phone.jpg": _bytes(b"\0\0\0\x18ftypheic" + bytes(64)),
    "cut.jpg": _cut("x.jpg", 0.6),
    "cut.png": _cut("x.png", 0.6),
}
# Found only by decoding.
DAMAGED_INSIDE: dict[str, Writer] = {
    "garbage.png": _garbage_png,
    "cut.bmp": _cut("x.bmp", 0.6),
    "cut.tif": _cut("x.tif", 0.6),
}


def write_all(folder: Path, collection: dict[str, Writer]) -> list[Path]:
    """Write a collection into a folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in collection.items():
        write(folder / name)
    return [folder / name for name in collection]
