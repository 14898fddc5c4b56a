"""Measure what the demo's previews show: which colours the shape in a picture has."""

from __future__ import annotations

import numpy as np
from PIL import Image

PURPLE = (132, 56, 192)
YELLOW = (252, 210, 45)
# Distance in RGB within which a pixel has a colour, or the background's; the nearest other colours
# lie 71 (orange) and 105 (blue) away.
TOLERANCE = 50.0


def colour_share(picture: Image.Image, colour: tuple[int, int, int]) -> float:
    """Share of the pixels of the shape on a picture that have a colour.

    The background is the median of the border. A picture that shows nothing has a share of 0.
    """
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float32)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    in_shape = _distances(pixels, np.median(border, axis=0)) > TOLERANCE
    in_colour = _distances(pixels, np.array(colour, dtype=np.float32)) <= TOLERANCE
    return float((in_shape & in_colour).sum() / max(1, in_shape.sum()))


def _distances(pixels: np.ndarray, colour: np.ndarray) -> np.ndarray:
    return np.linalg.norm(pixels - colour, axis=-1)
