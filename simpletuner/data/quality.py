"""What the dataset page tells of a file: its frames, colours, sharpness, motion, and near-duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simpletuner.data.buckets import Geometry
from simpletuner.data.clips import ClipFacts, frames_of, retry_once
from simpletuner.data.dataset import Dataset
from simpletuner.data.media import fit

SIDE = 8  # of the grid that is compared; two directions give 128 bits
BITS = 2 * SIDE**2
# How much two versions of a picture (another size or format, small corrections) may differ: bits, and the mean of the
# channels in any field of the grid. Bits alone do not tell apart two shapes on an even ground.
NEAR, LIKE = 8, 40
NOISE = 2  # of 255; a smaller difference would decide the bits of even areas by chance
ROWS = 1024  # compared with all others at a time, so that memory stays small


@dataclass(frozen=True)
class DatasetFile:
    """A picture or clip of a dataset, trained or not."""

    dataset: Dataset
    name: str

    @property
    def path(self) -> Path:
        return self.dataset.root / self.name

    @property
    def clip(self) -> ClipFacts | None:
        """Facts of a clip, as it is read for training; None for pictures."""
        facts, rules = self.dataset.facts[self.name].clip, self.dataset.clips
        return rules.read(facts) if rules and facts else None

    @property
    def seconds(self) -> float | None:
        """How much of a clip is trained, from its start; all of it if it is left out. None for pictures."""
        clip, rules = self.clip, self.dataset.clips
        if clip is None or rules is None:
            return None
        frames = rules.num_frames or rules.maximum
        return min(clip.seconds, frames / rules.rate) if frames else clip.seconds

    def frames(self, count: int) -> list[Image.Image]:
        """The picture, or frames of a clip at equal intervals of what is trained, by time.

        Raises:
            MediaError: it is damaged or cannot be read.
        """
        return retry_once(lambda: list(frames_of(self.path, count, count / (self.seconds or 1), self.clip)))


def colour_grid(picture: Image.Image) -> NDArray[np.int16]:
    """The mean colours of a grid of 9 x 9 fields, `9 9 3`."""
    return np.asarray(picture.resize((SIDE + 1, SIDE + 1), Image.Resampling.BOX), dtype=np.int16)


def difference_hash(prints: NDArray[np.int16]) -> NDArray[np.bool_]:
    """`N 128`: whether each of 8 x 8 fields is darker than the one to its right, and than the one below it."""
    grey = prints.mean(axis=3)
    here, right, below = grey[:, :-1, :-1], grey[:, :-1, 1:], grey[:, 1:, :-1]
    return np.concatenate([(each - here > NOISE).reshape(-1, SIDE**2) for each in (right, below)], axis=1)


def near_duplicates(prints: Sequence[NDArray[np.int16]]) -> list[list[int]]:
    """Groups of indices of pictures that are nearly the same as another one of the group, by their colour grids."""
    grids = np.array(prints, dtype=np.int16).reshape(-1, SIDE + 1, SIDE + 1, 3)
    signs = difference_hash(grids).astype(np.float32) * 2 - 1
    group = np.arange(len(grids))
    for start in range(0, len(grids), ROWS):
        agreeing = signs[start : start + ROWS] @ signs.T  # agreeing bits less differing ones
        for row, close in enumerate(agreeing >= BITS - 2 * NEAR, start):
            others = np.flatnonzero(close)
            apart = np.abs(grids[others] - grids[row]).mean(axis=3).max(axis=(1, 2))
            joined = group[others[apart <= LIKE]]
            group[np.isin(group, joined)] = joined.min()
    members = [np.flatnonzero(group == each).tolist() for each in np.unique(group)]
    return [each for each in members if len(each) > 1]


def sharpness(picture: Image.Image, geometry: Geometry) -> float:
    """Variance of the Laplacian of a picture as it is trained (Pech-Pacheco et al., ICPR 2000); low if out of focus."""
    grey = fit(picture.convert("L"), geometry, Image.Resampling.BILINEAR).astype(np.float32)
    around = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:]
    return float((around - 4 * grey[1:-1, 1:-1]).var())


def motion(frames: Sequence[Image.Image]) -> float:
    """Mean change of brightness between neighbouring frames, as a share of the full range."""
    small = [np.asarray(frame.convert("L").resize((64, 64), Image.Resampling.BOX), dtype=np.int16) for frame in frames]
    return float(np.abs(np.diff(small, axis=0)).mean() / 255)
