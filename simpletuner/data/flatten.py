"""Turns a decoded picture into 8-bit RGB on a background: depth, transparency and colour profile.

Large pictures are converted strip by strip, so that a picture takes 8 bytes per pixel at most: 4 of
its own, and 4 of the result.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageColor

from simpletuner.data.colour import DEEP_GREY, space_of
from simpletuner.data.files import MediaError

STRIP_PIXELS = 1 << 20
BoxOfPixels = tuple[int, int, int, int]


def flatten(
    picture: Image.Image, background: str, transform: ImageCms.ImageCmsTransform | None
) -> Image.Image:
    """The picture as 8-bit RGB; it may be converted in place.

    Args:
        background: colour of transparent areas.
        transform: converts its colours to sRGB; None leaves them as they are.

    Raises:
        MediaError: it holds values that are not numbers.
    """
    if picture.mode == "RGB" and transform is None and not picture.has_transparency_data:
        return picture
    is_deep = picture.mode.startswith(DEEP_GREY)
    white = 0.0
    if is_deep:
        white = _white_level(picture)
    rgb = picture
    if picture.mode != "RGB":
        rgb = Image.new("RGB", picture.size)
    for box in _strips(picture.size):
        strip = picture.crop(box)
        if is_deep:
            rgb.paste(_flatten_deep_strip(strip, background, transform, white), box)
        else:
            rgb.paste(_flatten_strip(strip, background, transform), box)
    return rgb


def is_deep_and_transparent(picture: Image.Image) -> bool:
    """Whether a picture declares a grey level of more than 8 bits transparent."""
    return picture.mode.startswith(DEEP_GREY) and isinstance(picture.info.get("transparency"), int)


def _strips(size: tuple[int, int]) -> Iterator[BoxOfPixels]:
    width, height = size
    rows = max(1, STRIP_PIXELS // width)
    for top in range(0, height, rows):
        yield 0, top, width, min(top + rows, height)


def _flatten_strip(
    strip: Image.Image, background: str, transform: ImageCms.ImageCmsTransform | None
) -> Image.Image:
    rgb = strip
    if transform is not None:
        rgb = transform.apply(_in_space(strip))
    if not strip.has_transparency_data:
        return rgb.convert("RGB")
    transparent = strip.convert("RGBA")
    if transform is None:
        rgb = transparent
    rgb.putalpha(transparent.getchannel("A"))
    behind = Image.new("RGBA", strip.size, background)
    return Image.alpha_composite(behind, rgb).convert("RGB")


def _in_space(strip: Image.Image) -> Image.Image:
    """The colours without transparency, in the mode that a conversion takes (`space_of`)."""
    space = space_of(strip.mode)
    if strip.mode == space:
        return strip
    if strip.mode in ("P", "PA"):
        strip = strip.convert("RGBA")  # applies the palette
    return strip.convert(space)


def _white_level(picture: Image.Image) -> float:
    """The value of white in a picture with more than 8 bits.

    16-bit values span 0..65535. 32-bit integers and floats have no fixed white level, so the
    smallest common level that covers all values is used: 1 or 255 (floats only), 65535, or the
    maximum of the picture.
    """
    if picture.mode.startswith("I;16"):
        return 65535.0
    top = 0.0
    for box in _strips(picture.size):
        values = np.asarray(picture.crop(box))
        if not np.isfinite(values).all():
            raise MediaError("is damaged: it holds values that are not numbers")
        top = max(top, float(values.max()))
    levels = [65535.0]
    if picture.mode == "F":
        levels = [1.0, 255.0, 65535.0]
    for white in levels:
        if top <= white:
            return white
    return top


def _flatten_deep_strip(
    strip: Image.Image, background: str, transform: ImageCms.ImageCmsTransform | None, white: float
) -> Image.Image:
    """Scale grey values of more than 8 bits to 0..255; Pillow's conversion clips them."""
    values = np.asarray(strip)
    scaled = np.clip(values.astype(np.float64) / white, 0, 1) * 255
    grey = Image.fromarray(np.rint(scaled).astype(np.uint8))
    if transform is None:
        rgb = grey.convert("RGB")
    else:
        rgb = transform.apply(grey)
    if is_deep_and_transparent(strip):
        clear: NDArray[np.bool_] = values == strip.info["transparency"]
        rgb.paste(ImageColor.getrgb(background), mask=Image.fromarray(clear))
    return rgb
