"""Measure what the video demo's previews show: where the shape goes."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

# Distance in RGB from the background, beyond which a pixel belongs to the shape.
TOLERANCE = 50.0
# Fewer pixels of the shape are taken for noise.
FEWEST_PIXELS = 10


def read_clip(path: Path) -> np.ndarray:
    """All frames of a file, `T H W 3`, uint8."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def path_of(clip: np.ndarray) -> np.ndarray:
    """Centres (x, y) of the shape in all frames of `T H W 3`, in pixels, `T 2`.

    The background is the median of the border. A frame that shows nothing repeats the centre
    before it; before the shape is first seen, it is the middle of the frame.
    """
    centre = (clip.shape[2] / 2, clip.shape[1] / 2)
    centres = []
    for frame in clip.astype(np.float32):
        border = np.concatenate([frame[0], frame[-1], frame[:, 0], frame[:, -1]])
        distances = np.linalg.norm(frame - np.median(border, axis=0), axis=-1)
        rows, columns = np.nonzero(distances > TOLERANCE)
        if len(rows) >= FEWEST_PIXELS:
            centre = (columns.mean(), rows.mean())
        centres.append(centre)
    return np.array(centres)


def rise(path: np.ndarray) -> float:
    """Farthest that a path is above the line between its ends, in pixels.

    A hop rises by 14 pixels, a straight path by 0; a path that sags has a negative rise.
    """
    line = np.linspace(path[0, 1], path[-1, 1], len(path))
    # Rows are counted from the top.
    above = line - path[:, 1]
    return float(above[np.abs(above).argmax()])
