"""Measure what the demo's previews show: which colours the shape in a picture has."""

from __future__ import annotations

import numpy as np
from PIL import Image

PURPLE = (132, 56, 192)
YELLOW = (252, 210, 45)
TOLERANCE = 50.0
"""Distance in RGB within which a pixel counts; the nearest other colours lie 71 (orange) and 105
(blue) away.
"""


def colour_share(picture: Image.Image, colour: tuple[int, int, int]) -> float:
    """Share of `colour` in the shape on a picture: of all pixels unlike the background, how many
    have it.

    The background is the median of the border. A picture that shows nothing has a share of 0.
    """
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float32)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    shape = np.linalg.norm(pixels - np.median(border, axis=0), axis=-1) > TOLERANCE
    alike = np.linalg.norm(pixels - np.array(colour, dtype=np.float32), axis=-1) <= TOLERANCE
    return float((shape & alike).sum() / max(1, shape.sum()))
