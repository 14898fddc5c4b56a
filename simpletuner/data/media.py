"""Pictures: whether a file is complete, its size, and its pixels resized and cropped.

Truncated files come from broken downloads or full disks. Decoding detects them in most formats; JPEG, the most common
one, is checked when the run is planned, and PNG has checksums that Pillow does not verify.
"""

from __future__ import annotations

import importlib
import io
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError, features

from simpletuner.data.buckets import Geometry
from simpletuner.data.files import LARGEST_PICTURE, MediaError, UnreadableError, read

# Importing a reader registers it; opening a file would import all of Pillow's, unless its own is there.
for plugin in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "WebP"):
    importlib.import_module(f"PIL.{plugin}ImagePlugin")

# First bytes of files, by the name of Pillow's reader for them.
MAGIC = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "BMP": (b"BM",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "GIF": (b"GIF87a", b"GIF89a"),
}
# Brands of the container that AVIF and HEIC share; mif1 and msf1 stand for either, and further brands say which.
AVIF_BRANDS, HEIF_BRANDS = (b"avif", b"avis"), (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")

# Chunks that affect what is shown; a damaged comment does no harm.
PNG_SHOWN = frozenset({b"IHDR", b"PLTE", b"IDAT", b"tRNS", b"eXIf"})
JPEG_END = b"\xff\xd9"
# In compressed data FF is followed by 00, by a restart marker or by another FF; anything else is a marker.
JPEG_MARKER_IN_DATA = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
JPEG_START_OF_SCAN, JPEG_END_OF_IMAGE = 0xDA, 0xD9


def sniff(head: bytes) -> str:
    """Pillow's name of a file's format, by its first bytes.

    Args:
        head: the first 64 bytes or more.

    Raises:
        MediaError: empty, or not a supported picture format.
    """
    if not head:
        raise MediaError("is empty")
    for kind, magic in MAGIC.items():
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp" and head[8:12] in AVIF_BRANDS + HEIF_BRANDS:
        brands = head[8 : int.from_bytes(head[:4], "big")]
        return "AVIF" if any(brand in brands for brand in AVIF_BRANDS) else "HEIF"
    raise MediaError("is not a picture")


@cache
def reader_problem(kind: str) -> str | None:
    """Why this machine cannot read a format, or None; registers the reader of HEIC."""
    if kind == "AVIF":
        if "avif" not in features.modules or not features.check("avif"):
            return "is in AVIF format, which needs a newer Pillow: pip install -U 'pillow>=11.3'"
        importlib.import_module("PIL.AvifImagePlugin")
    if kind == "HEIF":
        try:
            importlib.import_module("pillow_heif").register_heif_opener()
        except ImportError:
            return "is in HEIC format, which needs a package: pip install 'pillow-heif>=0.22,<2'"
    return None


def check_complete(file: BinaryIO, kind: str, size: int) -> None:
    """Walk the structure of a file to its end, in formats whose decoder does not notice a missing end.

    Args:
        file: the open file; its position changes.
        kind: from `sniff`.
        size: bytes in the file.

    Raises:
        MediaError: the end is missing, or a checksum does not match.
    """
    check = {"JPEG": _jpeg_end, "PNG": _png_end}.get(kind)
    if check is not None and not check(file, size):
        raise MediaError(f"is truncated: the {kind} data ends too early")


def png_has_orientation(file: BinaryIO, size: int) -> bool:
    """Whether a PNG chunk may hold an orientation; asking Pillow would decode the whole picture."""
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
    """Type, data offset and length of each chunk that is completely inside the file."""
    chunks = []
    position = 8  # after the signature
    while position + 12 <= size:  # length, type and checksum, of four bytes each
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
    """Whether the PNG ends properly; also verifies the checksums of what is shown, which Pillow skips for pixels."""
    chunks = _png_chunks(file, size)
    for kind, start, length in chunks:
        if kind in PNG_SHOWN:
            # The checksum covers the chunk's type and its data.
            file.seek(start - 4)
            covered = file.read(length + 4)
            if zlib.crc32(covered) != int.from_bytes(file.read(4), "big"):
                raise MediaError(f"is damaged: the checksum of a {kind.decode()} chunk does not match")
    return bool(chunks) and chunks[-1][0] == b"IEND"


def _jpeg_end(file: BinaryIO, size: int) -> bool:
    """Whether there is an end marker: as the last bytes, else by walking the segments, as some cameras append data."""
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


PICTURE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif"})

# What Pillow's readers raise on damaged data. Not MemoryError, which is not the file's fault.
DAMAGE = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, struct.error, zlib.error,
    NotImplementedError,
)  # fmt: skip

SIDEWAYS = frozenset({5, 6, 7, 8})
# By the EXIF orientation.
TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
UPRIGHT = {orientation: Image.Transpose[name] for orientation, name in enumerate(TURNS, 2)}


def probe(source: Path | bytes) -> tuple[int, int]:
    """Width and height of a picture in pixels after EXIF rotation, read from its header.

    Args:
        source: a file, or its content.

    Raises:
        MediaError: unreadable, empty, not a picture, damaged or truncated.
    """
    with _opened(source) as (file, picture, kind):
        size = file.seek(0, 2)
        width, height = picture.size
        if width < 1 or height < 1:
            raise MediaError(f"is damaged: its size is {width}x{height}")
        if isinstance(picture, TiffImagePlugin.TiffImageFile):
            # Some versions of Pillow rotate the size of a TIFF on opening, others when it is decoded.
            # tags ImageWidth and ImageLength
            width, height = picture.tag_v2[256], picture.tag_v2[257]
        if kind == "PNG" and not png_has_orientation(file, size):
            return width, height
        return (height, width) if _orientation(picture) in SIDEWAYS else (width, height)


def decode(source: Path | bytes, background: str = "white") -> Image.Image:
    """The first frame of a picture, upright, as 8-bit RGB.

    Args:
        source: a file, or its content.
        background: colour of transparent areas.

    Raises:
        MediaError: it cannot be decoded completely.
        MemoryError: never turned into a MediaError, since the file may be fine.
    """
    # Another package may have told Pillow to fill in missing data; here damage must be noticed.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    with _opened(source) as (_, picture, kind):
        picture.load()
        # Pillow itself rotates a TIFF by its orientation tag when it decodes it.
        turn = None if kind == "TIFF" else UPRIGHT.get(_orientation(picture))
        rgb = _to_rgb(picture, background)
        return rgb if turn is None else rgb.transpose(turn)


def fit(picture: Image.Image, geometry: Geometry, resampling: int = Image.Resampling.LANCZOS) -> NDArray[np.uint8]:
    """Resize with an antialiasing filter to `geometry.resized`, and crop.

    Only the crop is computed, so a very long picture needs no more memory than a square one.

    Returns:
        pixels 0..255, `H W 3`; of a greyscale picture `H W`.
    """
    left, top = geometry.crop
    width, height = geometry.size
    across, down = (own / resized for own, resized in zip(picture.size, geometry.resized, strict=True))
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    # Rounding must not move the box beyond the picture: Pillow would refuse it.
    box = (box[0], box[1], min(box[2], picture.width), min(box[3], picture.height))
    return np.asarray(picture.resize(geometry.size, resampling, box=box), dtype=np.uint8)


@contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[BinaryIO, Image.Image, str]]:
    """A structurally complete file, opened by Pillow; damage found inside the block becomes a MediaError."""
    data = source if isinstance(source, bytes) else read(source, LARGEST_PICTURE)
    file = io.BytesIO(data)
    try:
        kind = sniff(data[:64])
        problem = reader_problem(kind)
        if problem is not None:
            raise UnreadableError(problem)  # nothing is wrong with the file
        check_complete(file, kind, len(data))
        file.seek(0)
        # Other readers must not try damaged data: the error would be theirs.
        with Image.open(file, formats=[kind]) as picture:
            yield file, picture, kind
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaError(f"has too many pixels to be a training picture; make it smaller ({error})") from error
    except UnidentifiedImageError as error:
        raise MediaError("cannot be decoded: its header is damaged or not supported") from error
    except DAMAGE as error:
        raise _blame(error) from error


def _blame(error: Exception) -> Exception:
    """The meaning of a reader's failure: damage, or a machine that has run out of a resource."""
    if isinstance(error, OSError):
        if error.errno is not None:  # from the system and not from the file, whose bytes are all in memory
            return error
        if "out of memory" in str(error):
            return MemoryError(str(error))
        if "truncated" in str(error):
            return MediaError(f"is truncated: {error}")
    return MediaError(f"is damaged: {str(error) or type(error).__name__}")


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 if it is missing or the EXIF data is broken."""
    try:
        return int(picture.getexif().get(ExifTags.Base.Orientation, 1))
    except DAMAGE:
        return 1


def _to_rgb(picture: Image.Image, background: str) -> Image.Image:
    if picture.mode == "F" or picture.mode.startswith("I"):
        return _from_deep_grey(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, background), picture).convert("RGB")
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _from_deep_grey(picture: Image.Image) -> Image.Image:
    """Scale grey values of more than 8 bits to 0..255; Pillow's own conversion clips them.

    16-bit values span 0..65535. 32-bit integers and floats have no fixed white level, so the smallest usual one that
    covers all values is used: 1 or 255 (floats only), 65535, or the largest value itself.
    """
    values = np.asarray(picture, dtype=np.float64)
    if not np.isfinite(values).all():
        raise MediaError("is damaged: it holds values that are not numbers")
    top = max(float(values.max()), 0.0)
    whites = (1.0, 255.0, 65535.0) if picture.mode == "F" else (65535.0,)
    white = next((white for white in whites if top <= white), top)
    grey = np.rint(np.clip(values / white, 0, 1) * 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
