"""Measure what the video demo's previews show: where the shape goes."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

TOLERANCE = 50.0
"""Distance in RGB from the background, beyond which a pixel belongs to the shape."""


def read_clip(path: Path) -> np.ndarray:
    """All frames of a file: F H W 3, uint8."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def path_of(clip: np.ndarray) -> np.ndarray:
    """Centre of the shape in each frame, F 2 (x, y) in pixels; where nothing is seen, where it was
    seen before.
    """
    points = [(clip.shape[2] / 2, clip.shape[1] / 2)]
    for frame in clip.astype(np.float32):
        border = np.concatenate([frame[0], frame[-1], frame[:, 0], frame[:, -1]])
        rows, columns = np.nonzero(
            np.linalg.norm(frame - np.median(border, axis=0), axis=-1) > TOLERANCE
        )
        points.append((columns.mean(), rows.mean()) if len(rows) >= 10 else points[-1])
    return np.array(points[1:])


def rise(path: np.ndarray) -> float:
    """Farthest that a path is above the line between its ends, in pixels, negative below: a hop has
    14, a line 0.
    """
    above = np.linspace(path[0, 1], path[-1, 1], len(path)) - path[:, 1]
    return float(above[np.abs(above).argmax()])
