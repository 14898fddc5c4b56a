"""Formats of pictures: recognised by their first bytes, and checked for a missing end.

Decoders of JPEG and PNG do not notice every missing or damaged byte, so these are checked here,
without decoding.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import PIL
from PIL import features

from simpletuner.data.files import MediaError, UnsuitableError
from simpletuner.data.heif_boxes import holds_whole_boxes

# First bytes of a file, by the name of Pillow's reader.
MAGIC = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "BMP": (b"BM",),
    "TIFF": (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),
    "GIF": (b"GIF87a", b"GIF89a"),
}
# Other formats that files with the extension of a picture turn out to have.
FOREIGN = (
    ("a JPEG XL picture", b"\xff\x0a"),
    ("a JPEG XL picture", b"\0\0\0\x0cJXL \r\n\x87\n"),
    ("a JPEG 2000 picture", b"\0\0\0\x0cjP  \r\n\x87\n"),
    ("a JPEG 2000 picture", b"\xff\x4f\xff\x51"),
    ("a Photoshop file", b"8BPS"),
    ("a PDF document", b"%PDF-"),
    ("a Radiance HDR picture", b"#?RADIANCE"),
    ("an OpenEXR picture", b"v/1\x01"),
    ("an icon", b"\0\0\1\0"),
)
# Brands of the container that AVIF and HEIC share; mif1 and msf1 may be either, decided by further
# brands.
AVIF_BRANDS = (b"avif", b"avis")
HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"mif1", b"msf1")

# Chunks that affect the picture; a damaged comment is harmless.
PNG_SHOWN = frozenset({b"IHDR", b"PLTE", b"IDAT", b"tRNS", b"eXIf"})
PNG_TEXTS = frozenset({b"tEXt", b"zTXt", b"iTXt"})
PNG_EXIF = re.compile(rb"^....Raw profile type exif", re.DOTALL)
JPEG_END = b"\xff\xd9"
# In compressed data, FF is followed by 00, a restart marker or another FF; any other byte makes it
# a marker.
JPEG_MARKER_IN_DATA = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
JPEG_START_OF_SCAN = 0xDA
JPEG_END_OF_IMAGE = 0xD9


def sniff(head: bytes) -> str:
    """Pillow's name for a file's format, from its first bytes.

    Args:
        head: the first 64 bytes or more.

    Raises:
        MediaError: empty, or not a picture.
        UnsuitableError: in a format that is not read.
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
        if any(brand in brands for brand in AVIF_BRANDS):
            return "AVIF"
        return "HEIF"
    name = _other_format(head)
    if name is not None:
        raise UnsuitableError(f"is {name}, whatever its extension; convert it to PNG or JPEG")
    raise MediaError("is not a picture")


def _other_format(head: bytes) -> str | None:
    """What a file is that has the extension of a picture and another format, or None."""
    for name, beginning in FOREIGN:
        if head.startswith(beginning):
            return name
    if head[4:8] == b"ftyp":
        brand = head[8:12].decode("ascii", "replace").strip()
        return f"a clip, or a picture in a format that is not read ({brand})"
    return None


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
    if kind == "TIFF":
        _silence_libtiff()
    return None


def _silence_libtiff() -> None:
    """Keep libtiff from printing errors of damaged files; Pillow's error names the file."""
    package = Path(PIL.__file__).parent
    # Where the wheels of Linux and of macOS keep it.
    bundled = [*package.parent.glob("pillow.libs/libtiff*"), *package.glob(".dylibs/libtiff*")]
    for library in map(str, bundled):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(library).TIFFSetErrorHandler(None)


def png_has_orientation(data: bytes) -> bool:
    """Whether a PNG chunk may hold an orientation, without decoding as Pillow's `getexif` would."""
    for kind, covered, _ in _png_chunks(data):
        if kind == b"eXIf" or (kind in PNG_TEXTS and PNG_EXIF.search(covered[:64])):
            return True
    return False


def png_codes(data: bytes) -> tuple[int, int] | None:
    """Colour primaries and transfer curve of a PNG's cICP chunk, as numbers of ITU-T H.273.

    None without such a chunk.
    """
    for kind, covered, _ in _png_chunks(data):
        if kind == b"cICP" and len(covered) >= 6:
            return covered[4], covered[5]
        if kind == b"IDAT":  # such a chunk comes before the pixels
            return None
    return None


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, memoryview, int]]:
    """Every complete chunk, up to the end mark.

    Yields:
        its type, the bytes that the checksum covers (type and data), and the checksum.
    """
    position = 8  # after the signature
    kind = b""
    # A chunk has 12 bytes besides its data: length, type and checksum, of four bytes each.
    while kind != b"IEND" and position + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if end + 4 > len(data):
            return
        covered = memoryview(data)[position + 4 : end]
        checksum = int.from_bytes(data[end : end + 4], "big")
        yield kind, covered, checksum
        position = end + 4


def _png_ends(data: bytes) -> bool:
    """Whether a PNG has its end chunk; also verifies checksums, which Pillow skips for pixels."""
    kind = b""
    for kind, covered, checksum in _png_chunks(data):
        if kind in PNG_SHOWN and zlib.crc32(covered) != checksum:
            chunk = f"the checksum of its {kind.decode()} chunk"
            raise MediaError(f"is damaged: {chunk} does not match")
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
        if marker == JPEG_START_OF_SCAN:  # compressed data follows, up to the next marker
            next_marker = JPEG_MARKER_IN_DATA.search(data, position)
            if next_marker is None:
                return False
            position = next_marker.start()
    return data[position : position + 2] == JPEG_END


# Checks for formats whose decoders do not notice a missing end, or report it as something else.
END_CHECKS = {
    "JPEG": _jpeg_ends,
    "PNG": _png_ends,
    "AVIF": holds_whole_boxes,
    "HEIF": holds_whole_boxes,
}
