"""Pictures: checks that a file is complete, reads its size, and decodes, resizes and crops it.

Truncated files come from broken downloads or full disks. In most formats decoding detects them;
JPEG and PNG are checked when the run is planned. A file is damaged only if something proves it,
such as data that end too early. What a reader refuses for another reason is unsuitable: it may be
intact, in a variant that the reader does not know.
"""

from __future__ import annotations

import importlib
import io
import logging
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms, ImageFile, TiffImagePlugin, UnidentifiedImageError

from simpletuner.data.buckets import Geometry
from simpletuner.data.colour import refuse_hdr, refuse_hdr_profile, space_of, to_srgb
from simpletuner.data.decode_memory import DECODE_MEMORY
from simpletuner.data.display_p3 import DISPLAY_P3, display_p3
from simpletuner.data.files import (
    LARGEST_PICTURE,
    MediaError,
    UnreadableError,
    UnsuitableError,
    describe,
    read_file,
    unknown_errors_as_unsuitable,
)
from simpletuner.data.flatten import flatten, is_deep_and_transparent
from simpletuner.data.heif_boxes import shown_properties
from simpletuner.data.picture_formats import (
    END_CHECKS,
    png_codes,
    png_has_orientation,
    reader_problem,
    sniff,
)
from simpletuner.errors import is_out_of_memory

# Importing a reader registers it. For a format without a registered reader, Pillow would import all
# its readers. Pillow's warnings are about single files, which they do not name.
warnings.filterwarnings("ignore", module=r"PIL\.")
logging.getLogger("PIL").setLevel(logging.CRITICAL)
for plugin in ("Bmp", "Gif", "Jpeg", "Mpo", "Png", "WebP"):
    importlib.import_module(f"PIL.{plugin}ImagePlugin")

PICTURE_SUFFIXES = frozenset(
    {
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".mpo",  # of the pictures of an MPO file, the first
        ".png",
        ".webp",
        ".bmp",
        ".tif",
        ".tiff",
        ".avif",
        ".heic",
        ".heif",
        ".hif",
    }
)

# Errors by which Pillow's readers report damaged data.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error)
# Words by which the same errors report an intact file that the reader does not support.
UNSUPPORTED = re.compile(
    r"\bun(supported|known|recogni[sz]ed)\b|not (supported|available|implemented)|too large", re.I
)
RESAVE = "save it as .png or .jpg"
# Formats of which Pillow reads every variant, so that an unidentified header is a damaged one.
FULLY_READ = frozenset({"PNG", "WEBP"})
# Compressions of TIFF that libtiff may have been built without; it then fails as on damaged data.
OPTIONAL_COMPRESSIONS = frozenset({"webp", "zstd", "lzma"})

# Where Pillow keeps XMP metadata, and where it is kept out of Pillow's sight.
XMP_KEYS = ("xmp", "XML:com.adobe.xmp")
XMP_DROPPED = "dropped xmp"
XMP_TURN = re.compile(rb"tiff:Orientation(=\"|>)[2-8]")

# Tags of TIFF.
IMAGE_WIDTH = 256
IMAGE_LENGTH = 257
SIDEWAYS = frozenset({5, 6, 7, 8})
# Transpositions for the EXIF orientations 2 to 8.
TURNS = (
    "FLIP_LEFT_RIGHT",
    "ROTATE_180",
    "FLIP_TOP_BOTTOM",
    "TRANSPOSE",
    "ROTATE_270",
    "TRANSVERSE",
    "ROTATE_90",
)
UPRIGHT = {orientation: Image.Transpose[name] for orientation, name in enumerate(TURNS, 2)}


@dataclass(frozen=True)
class PictureFacts:
    """What the header of a picture declares.

    Attributes:
        width, height: pixels as shown, after any crop and rotation that the file asks for.
        conversions: see `Sample.conversions`.
    """

    width: int
    height: int
    conversions: tuple[str, ...] = ()


def probe(source: Path | bytes) -> tuple[int, int]:
    """Width and height of a picture in pixels as shown; raises as `inspect` does."""
    facts = inspect(source)
    return facts.width, facts.height


def inspect(source: Path | bytes) -> PictureFacts:
    """The facts of a picture, from its header.

    Args:
        source: a file, or its content.

    Raises:
        MediaError: unreadable, empty, not a picture, damaged or truncated.
        UnsuitableError: of a kind that would be decoded wrongly.
    """
    with _open_picture(source) as (data, picture, kind):
        width, height = picture.size
        if width < 1 or height < 1:
            raise MediaError(f"is damaged: its size is {width}x{height}")
        aperture = _aperture(data, picture, kind)
        transform = _conversion(data, picture, kind)
        orientation = _orientation(data, picture, kind)
        if aperture is not None:
            left, top, right, bottom = aperture
            width = right - left
            height = bottom - top
        # Some versions of Pillow rotate the size of a TIFF on opening, others when decoding it.
        if isinstance(picture, TiffImagePlugin.TiffImageFile):
            width = picture.tag_v2[IMAGE_WIDTH]
            height = picture.tag_v2[IMAGE_LENGTH]
        if orientation in SIDEWAYS:
            width, height = height, width

        # Part of the cache key: a change of wording or order would re-encode these pictures.
        conversions: list[str] = []
        if transform is not None:
            conversions.append("converted to sRGB")
        if aperture is not None:
            conversions.append("cropped to its clean aperture")
        if is_deep_and_transparent(picture):
            conversions.append("shown on white")
        if orientation is None and _turned_by_xmp(picture):
            conversions.append("turned by EXIF alone")
        return PictureFacts(width, height, tuple(conversions))


def decode(source: Path | bytes, background: str = "white") -> Image.Image:
    """The first frame of a picture, upright, as 8-bit sRGB.

    Args:
        source: a file, or its content.
        background: colour of transparent areas.

    Raises:
        MediaError: the file cannot be decoded completely.
        MemoryError: out of memory; never a MediaError, since the file may be intact.
    """
    # Another package may have enabled this option, which hides damage.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    with _open_picture(source) as (data, picture, kind), DECODE_MEMORY.reserved(picture.size):
        transform = _conversion(data, picture, kind)
        aperture = _aperture(data, picture, kind)
        picture.load()
        # Pillow applies the orientation tag of a TIFF when it decodes the file.
        turn = None
        if kind != "TIFF":
            turn = UPRIGHT.get(_orientation(data, picture, kind) or 1)
        shown = picture
        if aperture is not None:
            shown = picture.crop(aperture)
        rgb = flatten(shown, background, transform)
        if turn is None:
            return rgb
        return rgb.transpose(turn)


def fit(
    picture: Image.Image, geometry: Geometry, resampling: int = Image.Resampling.LANCZOS
) -> NDArray[np.uint8]:
    """Resize with an antialiasing filter to `geometry.resized`, and crop.

    Only the crop is computed, so a very long picture needs no more memory than a square one.

    Returns:
        pixels 0..255, `H W 3`; `H W` for a greyscale picture.
    """
    left, top = geometry.crop
    width, height = geometry.size
    # Pixels of the picture for each pixel of the resized one.
    resized_width, resized_height = geometry.resized
    across = picture.width / resized_width
    down = picture.height / resized_height
    # Pillow rejects a box that rounding has moved beyond the picture.
    right = min((left + width) * across, picture.width)
    bottom = min((top + height) * down, picture.height)
    box = (left * across, top * down, right, bottom)
    return np.asarray(picture.resize(geometry.size, resampling, box=box), dtype=np.uint8)


@contextmanager
def _open_picture(source: Path | bytes) -> Iterator[tuple[bytes, Image.Image, str]]:
    """(content, picture, format) of a complete file; its errors in the block become MediaErrors."""
    data = source if isinstance(source, bytes) else read_file(source, LARGEST_PICTURE)
    with unknown_errors_as_unsuitable():
        kind = sniff(data[:64])
        problem = reader_problem(kind)
        if problem is not None:
            raise UnreadableError(problem)  # the file may be intact
        if kind in END_CHECKS and not END_CHECKS[kind](data):
            raise MediaError(f"is truncated: the {kind} data ends too early")
        with _open_as(kind, data) as picture:
            yield data, picture, kind


@contextmanager
def _open_as(kind: str, data: bytes) -> Iterator[Image.Image]:
    """A picture of a known format; errors of its reader become MediaErrors."""
    picture: Image.Image | None = None
    try:
        # Only this reader: errors of other readers on damaged data would be misleading.
        with Image.open(io.BytesIO(data), formats=[kind]) as picture:
            _drop_xmp(picture)
            yield picture
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        detail = "has too many pixels to be a training picture; make it smaller"
        raise UnsuitableError(f"{detail} ({error})") from error
    except UnidentifiedImageError as error:
        if kind in FULLY_READ:
            raise MediaError("is damaged: its header cannot be read") from error
        detail = f"has a header ({kind}) that is damaged or of a kind that is not read"
        raise UnsuitableError(f"{detail}; {RESAVE}") from error
    except DAMAGE as error:
        raise _translated(error, picture) from error


def _translated(error: Exception, picture: Image.Image | None) -> Exception:
    """A reader's error as one that names the cause: the file, the reader, or the machine."""
    # The bytes of the file are in memory already, so an error of the system is not about the file.
    if isinstance(error, OSError) and error.errno is not None:
        return error
    if is_out_of_memory(error):
        return MemoryError(str(error))
    reason = describe(error)
    compression = picture.info.get("compression") if picture else None
    if compression in OPTIONAL_COMPRESSIONS:
        detail = f"is damaged, or its compression {compression} is not supported here"
        return UnsuitableError(f"{detail}; {RESAVE} ({reason})")
    if UNSUPPORTED.search(reason):
        detail = "cannot be decoded here, although it may be intact"
        return UnsuitableError(f"{detail}; {RESAVE} ({reason})")
    if "truncated" in reason.lower():
        return MediaError(f"is truncated: {reason}")
    return MediaError(f"is damaged: {reason}")


def _orientation(data: bytes, picture: Image.Image, kind: str) -> int | None:
    """The EXIF orientation, 1 to 8; None if it is missing or the EXIF data is broken."""
    if kind == "PNG" and not png_has_orientation(data):
        return None  # to look for it, Pillow would decode the whole picture
    try:
        with DECODE_MEMORY.reserved(picture.size):
            return int(picture.getexif()[ExifTags.Base.Orientation])
    except Exception:  # noqa: BLE001 - whatever broken metadata raise, the pixels may be intact
        return None


def _drop_xmp(picture: Image.Image) -> None:
    """Hide XMP from Pillow, which would take an orientation from it.

    Editors leave that behind when they turn the pixels.
    """
    for key in XMP_KEYS:
        if key in picture.info:
            picture.info[XMP_DROPPED] = picture.info.pop(key)


def _turned_by_xmp(picture: Image.Image) -> bool:
    """Whether its XMP holds an orientation, which earlier versions obeyed where EXIF holds none."""
    xmp = picture.info.get(XMP_DROPPED, b"")
    if isinstance(xmp, str):
        xmp = xmp.encode("utf-8", "replace")
    return XMP_TURN.search(xmp) is not None


def _conversion(data: bytes, picture: Image.Image, kind: str) -> ImageCms.ImageCmsTransform | None:
    """How the colours become sRGB; None if they are.

    Raises:
        UnsuitableError: HDR, colours that sRGB cannot represent, or a broken profile.
    """
    profile = picture.info.get("icc_profile")
    codes = None
    if kind == "PNG":
        codes = png_codes(data)
    elif kind in ("AVIF", "HEIF"):
        codes = shown_properties(data).codes
    if codes is not None:
        primaries, curve = codes
        # A profile, if there is one, describes the colours more exactly than the number.
        checked_primaries = [] if profile else [primaries]
        refuse_hdr([curve], checked_primaries, "pictures", "sRGB")
        if primaries == DISPLAY_P3 and not profile:
            profile = display_p3()
    if not profile:
        return None
    refuse_hdr_profile(profile)
    return to_srgb(profile, space_of(picture.mode))


def _aperture(data: bytes, picture: Image.Image, kind: str) -> tuple[int, int, int, int] | None:
    """The part of a picture to show, which Pillow ignores in AVIF; None shows everything.

    Raises:
        UnsuitableError: a part that is not made of whole pixels, or not within the picture.
    """
    if kind != "AVIF":
        return None
    aperture = shown_properties(data).aperture
    if aperture is None:
        return None
    box = aperture.within(picture.size)
    if box is None:
        raise UnsuitableError(
            "has a clean aperture that cannot be applied; crop it and save it again"
        )
    if box == (0, 0, *picture.size):
        return None
    return box
