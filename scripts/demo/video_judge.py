"""Follow the shape through a clip: where it is in each frame, and how high its path rises."""

from __future__ import annotations

import numpy as np
from video_world import SIZE

CONTRAST = 60.0
"""Sum of the differences in R, G and B from which a pixel belongs to the shape."""


def trace(clip: np.ndarray) -> np.ndarray:
    """Centre of the shape in every frame, in pixels; the middle of a frame that shows none.

    Args:
        clip: F H W 3, uint8.

    Returns:
        F 2, x and y.
    """
    points = []
    for frame in clip.astype(np.float32):
        border = np.concatenate([frame[0], frame[-1], frame[:, 0], frame[:, -1]])
        rows, columns = np.nonzero(np.abs(frame - np.median(border, axis=0)).sum(-1) > CONTRAST)
        if len(rows):
            points.append((columns.mean() + 0.5, rows.mean() + 0.5))
        else:
            points.append((SIZE / 2, SIZE / 2))
    return np.array(points)


def rise(path: np.ndarray) -> float:
    """The farthest that a path (F 2) is above the straight line between its ends, in pixels.

    Below the line it is negative. A hop has 14; a line, however steep, 0.
    """
    above = np.linspace(path[0, 1], path[-1, 1], len(path)) - path[:, 1]
    return float(above[np.abs(above).argmax()])
