"""Recognise what a picture shows: the measure of how well the demo's checkpoint draws.

Without a network: the background is the colour of the border, and the shape is whatever differs
from it. Its outline is compared with the five shapes drawn to the same size, and its colours with
the palette.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image
from world import BACKGROUNDS, COLOURS, SHAPES, draw_shape


@dataclass(frozen=True)
class Verdict:
    """What a picture seems to show."""

    shape: str
    colour: str
    rim: str | None
    background: str


def nearest(pixels: np.ndarray, palette: dict[str, tuple[int, int, int]]) -> np.ndarray:
    """Index of the palette's nearest colour in RGB for every pixel. ... 3 to ..."""
    colours = np.array(list(palette.values()), dtype=np.float32)
    return np.square(pixels[..., None, :].astype(np.float32) - colours).sum(-1).argmin(-1)


def most_common(indices: np.ndarray, palette: dict[str, tuple[int, int, int]]) -> str:
    """The colour that occurs most often."""
    return list(palette)[int(np.bincount(indices.ravel(), minlength=len(palette)).argmax())]


def shape_mask(shape: str, height: int, width: int) -> np.ndarray:
    """The outline of `shape` stretched to fill a box of this size. Returns H W, bool."""
    drawn = draw_shape(shape, 40.0, (48.0, 48.0), (255, 255, 255), None, (0, 0, 0))[..., 0] > 127
    rows = np.flatnonzero(drawn.any(1))
    columns = np.flatnonzero(drawn.any(0))
    cut = drawn[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return np.asarray(Image.fromarray(cut).resize((width, height))).astype(bool)


def judge(picture: np.ndarray) -> Verdict | None:
    """What `picture` (H W 3, uint8) shows, or None where nothing stands out from the background."""
    border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
    ground = np.median(border, axis=0)
    mask = np.abs(picture.astype(np.float32) - ground).sum(-1) > 60
    # A row or column belongs to the shape if it has three pixels, so that specks do not stretch the
    # box.
    rows = np.flatnonzero(mask.sum(1) >= 3)
    columns = np.flatnonzero(mask.sum(0) >= 3)
    if len(rows) < 8 or len(columns) < 8:
        return None
    box = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    mask = mask[box]
    inside = picture[box]

    def overlap(shape: str) -> float:
        ideal = shape_mask(shape, *mask.shape)
        return float((ideal & mask).sum() / (ideal | mask).sum())

    # Diamonds and squares fill the same share of their box in any proportion, so stretching them
    # changes nothing.
    shape = max(SHAPES, key=overlap)
    ideal = shape_mask(shape, *mask.shape)
    height, width = mask.shape
    # The heart of the shape, which no rim reaches, and the part near the outline. The heart of a
    # triangle is its centroid, which is below the middle of its box.
    heart = np.zeros_like(ideal)
    row = round(height * (0.62 if shape == "triangle" else 0.5))
    column = width // 2
    rows_reach = max(2, height // 8)
    columns_reach = max(2, width // 8)
    heart_rows = slice(max(0, row - rows_reach), row + rows_reach)
    heart_columns = slice(column - columns_reach, column + columns_reach)
    heart[heart_rows, heart_columns] = True
    edge = ideal & mask & ~erode(ideal, max(3, round(0.09 * min(height, width))))
    colours = nearest(inside, COLOURS)
    colour = most_common(colours[heart], COLOURS)
    rim = most_common(colours[edge], COLOURS)
    background = list(BACKGROUNDS)[int(nearest(ground, BACKGROUNDS))]
    return Verdict(shape, colour, None if rim == colour else rim, background)


def erode(mask: np.ndarray, depth: int) -> np.ndarray:
    """`mask` without everything closer than `depth` pixels to its outside."""
    mask = np.pad(mask, 1)
    for _ in range(depth):
        mask = (
            mask
            & np.roll(mask, 1, 0)
            & np.roll(mask, -1, 0)
            & np.roll(mask, 1, 1)
            & np.roll(mask, -1, 1)
        )
    return mask[1:-1, 1:-1]
