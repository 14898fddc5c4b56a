"""Follow the shape through a clip: where it is in each frame, and how much of a ring its path is."""

from __future__ import annotations

import math

import numpy as np
from video_world import REACH, SIZE

CONTRAST = 60.0
"""Sum of the differences in R, G and B from which a pixel belongs to the shape."""


def trace(clip: np.ndarray) -> np.ndarray:
    """Centre of what differs from the background, in pixels, for each frame; the middle where nothing does.

    Args:
        clip: F H W 3, uint8.

    Returns:
        F 2, x and y.
    """
    points = []
    for frame in clip.astype(np.float32):
        border = np.concatenate([frame[0], frame[-1], frame[:, 0], frame[:, -1]])
        rows, columns = np.nonzero(np.abs(frame - np.median(border, axis=0)).sum(-1) > CONTRAST)
        points.append((columns.mean() + 0.5, rows.mean() + 0.5) if len(rows) else (SIZE / 2, SIZE / 2))
    return np.array(points)


def roundness(path: np.ndarray) -> float:
    """Signed area that a path (F 2) encloses, as a share of the ring's: 1 for the ring itself, 0 for any straight line.

    The area is that of the polygon, by the shoelace formula; clockwise on the screen counts as positive.
    """
    (x, y), (next_x, next_y) = path.T, np.roll(path, -1, axis=0).T
    return float((x * next_y - next_x * y).sum() / 2 / (math.pi * (REACH * SIZE) ** 2))
