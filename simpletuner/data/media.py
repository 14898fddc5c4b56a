"""Pictures from files: their size without decoding, their pixels as the models take them.

`probe` and `decode` are the whole seam between the data room and media formats; another kind of media brings its own
pair. Both see a picture upright: the EXIF rotation is applied.
"""

from __future__ import annotations

import errno
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

# Importing the readers registers them, so that opening a file never has to import all of Pillow's.
from PIL import (
    BmpImagePlugin,  # noqa: F401
    ExifTags,
    GifImagePlugin,  # noqa: F401
    Image,
    ImageFile,
    JpegImagePlugin,  # noqa: F401
    MpoImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,  # noqa: F401
)

from .buckets import Geometry
from .structure import MediaError, check_complete, check_strips, png_has_orientation, sniff

__all__ = ["PICTURE_SUFFIXES", "MediaError", "decode", "fit", "probe"]

PICTURE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff"})

# What Pillow's readers raise on damaged data. MemoryError is never among them: it is not the file's fault.
DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    ArithmeticError,
    struct.error,
    zlib.error,
    NotImplementedError,
)
NOT_THE_FILES_FAULT = frozenset({errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EINTR})

SIDEWAYS = frozenset({5, 6, 7, 8})
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def probe(path: Path) -> tuple[int, int]:
    """Width and height of a picture in pixels after EXIF rotation, read from its header.

    Raises:
        MediaError: unreadable, empty, not a picture, damaged or cut.
    """
    with _opened(path) as (file, picture, kind):
        size = file.seek(0, 2)
        width, height = picture.size
        if width < 1 or height < 1:
            raise MediaError(f"is damaged: its size is {width}x{height}")
        if isinstance(picture, TiffImagePlugin.TiffImageFile):
            # Some versions of Pillow rotate the size of a TIFF on opening, others when it is decoded.
            width, height = picture.tag_v2[256], picture.tag_v2[257]
        if kind == "PNG" and not png_has_orientation(file, size):
            return width, height
        return (height, width) if _orientation(picture) in SIDEWAYS else (width, height)


def decode(path: Path) -> Image.Image:
    """The first frame of a picture, upright, as RGB with 8 bits; what is transparent becomes white.

    Raises:
        MediaError: it cannot be decoded completely.
        MemoryError: never turned into a MediaError, the file may be fine.
    """
    # Another package may have told Pillow to fill up what is missing; here damage must show.
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    with _opened(path) as (_, picture, kind):
        picture.load()
        turn = None if kind == "TIFF" else UPRIGHT.get(_orientation(picture))
        rgb = _to_rgb(picture)
        return rgb if turn is None else rgb.transpose(turn)


def fit(picture: Image.Image, geometry: Geometry) -> NDArray[np.uint8]:
    """Resize with an antialiasing filter to `geometry.resized` and cut out the crop box.

    Only the part that is kept is computed, so a very long picture needs no more memory than a square one.

    Returns:
        pixels 0..255, `H W 3`.
    """
    left, top = geometry.crop
    width, height = geometry.size
    across, down = (own / resized for own, resized in zip(picture.size, geometry.resized, strict=True))
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    # The box must not end beyond the picture by a rounding error.
    box = (box[0], box[1], min(box[2], picture.width), min(box[3], picture.height))
    return np.asarray(picture.resize(geometry.size, Image.Resampling.LANCZOS, box=box), dtype=np.uint8)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Image.Image, str]]:
    """A file that is whole by its structure, opened by Pillow; damage inside the block becomes a MediaError."""
    try:
        with path.open("rb") as file:
            kind = sniff(file.read(16))
            size = file.seek(0, 2)
            check_complete(file, kind, size)
            file.seek(0)
            with Image.open(file, formats=[kind]) as picture:
                if isinstance(picture, TiffImagePlugin.TiffImageFile):
                    check_strips(picture.tag_v2, size)
                yield file, picture, kind
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise MediaError(f"has too many pixels to be a training picture; make it smaller ({error})") from error
    except UnidentifiedImageError as error:
        raise MediaError("cannot be decoded: its header is damaged or of a kind that is not supported") from error
    except DAMAGE as error:
        raise _blame(error) from error


def _blame(error: Exception) -> Exception:
    """What a failure of a reader means: damage, or a machine that has run out of something."""
    if isinstance(error, OSError):
        if error.errno in NOT_THE_FILES_FAULT:
            return error
        if error.errno is not None:
            return MediaError(f"cannot be read: {error.strerror}")
        if "out of memory" in str(error):
            return MemoryError(str(error))
        if "truncated" in str(error):
            return MediaError(f"is truncated: {error}")
    return MediaError(f"is damaged: {str(error) or type(error).__name__}")


def _orientation(picture: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 where it is missing or the EXIF data is broken."""
    try:
        return int(picture.getexif().get(ExifTags.Base.Orientation, 1))
    except DAMAGE:
        return 1


def _to_rgb(picture: Image.Image) -> Image.Image:
    if picture.mode == "F" or picture.mode.startswith("I"):
        return _from_deep_grey(picture)
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def _from_deep_grey(picture: Image.Image) -> Image.Image:
    """Scale grey values of more than 8 bits into 0..255; Pillow's own conversion clips them.

    16-bit values span 0..65535. 32-bit integers and floats have no fixed white, so the smallest of the usual ones
    (1 for floats, 255 for floats, 65535, the largest value) that holds them all is taken.
    """
    values = np.asarray(picture, dtype=np.float64)
    if not np.isfinite(values).all():
        raise MediaError("is damaged: it holds values that are not numbers")
    top = max(float(values.max()), 0.0)
    whites = (1.0, 255.0, 65535.0) if picture.mode == "F" else (65535.0,)
    white = next((white for white in whites if top <= white), top)
    grey = np.rint(np.clip(values / white, 0, 1) * 255).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB")
