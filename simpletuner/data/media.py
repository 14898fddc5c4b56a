"""Pictures: checks that a file is complete, reads its size, and decodes, resizes and crops its pixels.

Truncated files come from broken downloads or full disks. In most formats decoding detects them. JPEG, the most common
format, is checked when the run is planned; so is PNG, whose checksums Pillow does not verify.
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

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile, TiffImagePlugin, UnidentifiedImageError, features

from simpletuner.data.buckets import Geometry
from simpletuner.data.files import LARGEST_PICTURE, MediaError, UnreadableError, UnsuitableError, read_file

# Importing a reader registers it. For a format without a registered reader, Pillow would import all its readers.
for plugin in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "WebP"):
    importlib.import_module(f"PIL.{plugin}ImagePlugin")

# First bytes of a file, by the name of Pillow's reader.
MAGIC = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "BMP": (b"BM",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "GIF": (b"GIF87a", b"GIF89a"),
}
# Brands of the container that AVIF and HEIC share; mif1 and msf1 may be either, decided by further brands.
AVIF_BRANDS, HEIF_BRANDS = (b"avif", b"avis"), (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")

# Chunks that affect the picture; a damaged comment is harmless.
PNG_SHOWN = frozenset({b"IHDR", b"PLTE", b"IDAT", b"tRNS", b"eXIf"})
PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
PNG_ORIENTATION = re.compile(rb"^....Raw profile type exif|Orientation", re.DOTALL)
JPEG_END = b"\xff\xd9"
# In compressed data, FF is followed by 00, a restart marker or another FF; any other byte makes it a marker.
JPEG_MARKER_IN_DATA = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
JPEG_START_OF_SCAN, JPEG_END_OF_IMAGE = 0xDA, 0xD9


def sniff(head: bytes) -> str:
    """Pillow's name for a file's format, from its first bytes.

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


def png_has_orientation(data: bytes) -> bool:
    """Whether a PNG chunk may hold an orientation; Pillow's `getexif` would decode the whole picture."""
    for kind, covered, _ in _png_chunks(data):
        if kind == b"eXIf" or (kind in PNG_TEXTS and PNG_ORIENTATION.search(covered[: 1 << 20])):
            return True
    return False


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, memoryview, int]]:
    """Type, bytes covered by the checksum (type and data), and checksum of every complete chunk, up to the end mark."""
    position, kind = 8, b""  # after the signature
    while kind != b"IEND" and position + 12 <= len(data):  # length, type and checksum, of four bytes each
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if end + 4 > len(data):
            return
        yield kind, memoryview(data)[position + 4 : end], int.from_bytes(data[end : end + 4], "big")
        position = end + 4


def _png_ends(data: bytes) -> bool:
    """Whether a PNG has its end chunk; also verifies checksums, which Pillow skips for pixels."""
    kind = b""
    for kind, covered, checksum in _png_chunks(data):
        if kind in PNG_SHOWN and zlib.crc32(covered) != checksum:
            raise MediaError(f"is damaged: the checksum of its {kind.decode()} chunk does not match")
    return kind == b"IEND"


def _jpeg_ends(data: bytes) -> bool:
    """Whether a JPEG has its end marker, as the last bytes or earlier: some cameras append data."""
    if data.endswith(JPEG_END):
        return True
    position = 2
    while position + 4 <= len(data) and data[position] == 0xFF:
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


# Checks for formats whose decoders do not notice a missing end.
ENDS = {"JPEG": _jpeg_ends, "PNG": _png_ends}

PICTURE_SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo",  # of the pictures of an MPO file, the first
    ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".heif", ".hif",
})  # fmt: skip

# Errors that Pillow's readers raise on damaged data. Not MemoryError, which is not the file's fault.
DAMAGE = (
    OSError, SyntaxError, ValueError, TypeError, LookupError, EOFError, ArithmeticError, struct.error, zlib.error,
    NotImplementedError,
)  # fmt: skip

SIDEWAYS = frozenset({5, 6, 7, 8})
# Transpositions for the EXIF orientations 2 to 8.
TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
UPRIGHT = {orientation: Image.Transpose[name] for orientation, name in enumerate(TURNS, 2)}


def probe(source: Path | bytes) -> tuple[int, int]:
    """Width and height of a picture in pixels after EXIF rotation, read from its header.

    Args:
        source: a file, or its content.

    Raises:
        MediaError: unreadable, empty, not a picture, damaged or truncated.
    """
    with _opened(source) as (data, picture, kind):
        width, height = picture.size
        if width < 1 or height < 1:
            raise MediaError(f"is damaged: its size is {width}x{height}")
        if isinstance(picture, TiffImagePlugin.TiffImageFile):
            # Some versions of Pillow rotate the size of a TIFF on opening, others when it is decoded.
            # tags ImageWidth and ImageLength
            width, height = picture.tag_v2[256], picture.tag_v2[257]
        if kind == "PNG" and not png_has_orientation(data):
            return width, height
        return (height, width) if _orientation(picture) in SIDEWAYS else (width, height)


def decode(source: Path | bytes, background: str = "white") -> Image.Image:
    """The first frame of a picture, upright, as 8-bit RGB.

    Args:
        source: a file, or its content.
        background: colour of transparent areas.

    Raises:
        MediaError: the file cannot be decoded completely.
        MemoryError: out of memory; never a MediaError, since the file may be intact.
    """
    # Another package may have enabled this option, which hides damage.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    with _opened(source) as (_, picture, kind):
        picture.load()
        # Pillow applies the orientation tag of a TIFF when it decodes the file.
        turn = None if kind == "TIFF" else UPRIGHT.get(_orientation(picture))
        rgb = _to_rgb(picture, background)
        return rgb if turn is None else rgb.transpose(turn)


def fit(picture: Image.Image, geometry: Geometry, resampling: int = Image.Resampling.LANCZOS) -> NDArray[np.uint8]:
    """Resize with an antialiasing filter to `geometry.resized`, and crop.

    Only the crop is computed, so a very long picture needs no more memory than a square one.

    Returns:
        pixels 0..255, `H W 3`; `H W` for a greyscale picture.
    """
    left, top = geometry.crop
    width, height = geometry.size
    across, down = (original / resized for original, resized in zip(picture.size, geometry.resized, strict=True))
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    # Pillow rejects a box that rounding has moved beyond the picture.
    box = (box[0], box[1], min(box[2], picture.width), min(box[3], picture.height))
    return np.asarray(picture.resize(geometry.size, resampling, box=box), dtype=np.uint8)


@contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[bytes, Image.Image, str]]:
    """(content, picture, format) of a complete file; decoding errors inside the block become MediaErrors."""
    data = source if isinstance(source, bytes) else read_file(source, LARGEST_PICTURE)
    try:
        kind = sniff(data[:64])
        problem = reader_problem(kind)
        if problem is not None:
            raise UnreadableError(problem)  # the file may be intact
        if kind in ENDS and not ENDS[kind](data):
            raise MediaError(f"is truncated: the {kind} data ends too early")
        # Only this reader: errors of other readers on damaged data would be misleading.
        with Image.open(io.BytesIO(data), formats=[kind]) as picture:
            yield data, picture, kind
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UnsuitableError(f"has too many pixels to be a training picture; make it smaller ({error})") from error
    except UnidentifiedImageError as error:
        raise MediaError("cannot be decoded: its header is damaged or not supported") from error
    except DAMAGE as error:
        raise _blame(error) from error


def _blame(error: Exception) -> Exception:
    """Translate a reader's error: a damaged file, or a machine out of some resource."""
    if isinstance(error, OSError):
        if error.errno is not None:  # an error of the system: the bytes of the file are already in memory
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
    """Scale grey values of more than 8 bits to 0..255; Pillow's conversion clips them.

    16-bit values span 0..65535. 32-bit integers and floats have no fixed white level, so the smallest common level that
    covers all values is used: 1 or 255 (floats only), 65535, or the maximum of the picture.
    """
    values = np.asarray(picture, dtype=np.float64)
    if not np.isfinite(values).all():
        raise MediaError("is damaged: it holds values that are not numbers")
    top = max(float(values.max()), 0.0)
    whites = (1.0, 255.0, 65535.0) if picture.mode == "F" else (65535.0,)
    white = next((white for white in whites if top <= white), top)
    grey = np.rint(np.clip(values / white, 0, 1) * 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
