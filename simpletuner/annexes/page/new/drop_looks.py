"""What is measured in the files of a drop, and what is wrong with them.

Files are decoded once and remembered by their size and time, a few in each request.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from simpletuner.annexes.captions.dataset_page import colour_grid, near_duplicates
from simpletuner.data.clips import ClipFacts, frames_of, is_clip, probe_clip
from simpletuner.data.files import MediaError

# Pictures are measured at this size of their shorter side: finer detail is not trained.
MEASURED_SIDE = 1024
# A picture is called blurred only if both measures say so; see `edge_contrast` and `softness`.
# Real photographs have a contrast of 34 and more and a softness of .47 and less; blurred by a
# Gaussian of 4 pixels, 9 and less and .5 and more. Almost empty pictures, and soft styles with some
# sharp lines, satisfy only one of the two.
MOST_CONTRAST = 12.0
LEAST_SOFTNESS = 0.5
SMALLEST_MEASURED = 200  # pixels of the shorter side; of less, no blur is measured
LINKED = "is behind a link out of the project"
TILES = 8  # in each direction
REBLUR = 9  # pixels
# Where more than this share seems blurred, it is the style of the pictures, and none is marked.
MOST_BLURRED = 0.5


@dataclass(frozen=True)
class Look:
    """What is seen in a file.

    Attributes:
        stamp: changes with the content of the file.
        size: width and height in pixels; zeros for an unreadable file.
        clip: facts of a clip; None for pictures.
        problem: why the file cannot be used, as a text that continues its name; else empty.
        contrast: `edge_contrast` of a picture; None if it is not measured.
        is_blurred: of a picture, out of focus.
        grid: its `colour_grid`, by which duplicates are found; None for an unreadable file.
    """

    stamp: str
    size: tuple[int, int] = (0, 0)
    clip: ClipFacts | None = None
    problem: str = ""
    contrast: float | None = None
    is_blurred: bool = False
    grid: NDArray[np.int16] | None = None


# What is remembered, by folder: the look of each file, and the files that show the same with a hash
# of the looks by which they were found.
_looks: dict[Path, dict[str, Look]] = defaultdict(dict)
_groups: dict[Path, tuple[int, list[list[str]]]] = {}
# One request decodes at a time: the page asks again and again, from several tabs.
_looking = threading.Lock()


def stamp(path: Path) -> str:
    """Size and time of a file, which change with its content; empty if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}"


def look_at(
    folder: Path, names: Iterable[str], seconds: float, may_show: Callable[[Path], bool]
) -> dict[str, Look]:
    """The looks of the files that are known, or can be seen in time, in the order of `names`.

    Args:
        seconds: after which no further file is decoded.
        may_show: whether the page may show a file; asked before it is decoded.
    """
    end = time.monotonic() + seconds
    seen: dict[str, Look] = {}
    with _looking:
        known = _looks[folder]
        for name in names:
            path = folder / name
            now = stamp(path)
            look = known.get(name)
            if look is None or look.stamp != now:
                if time.monotonic() > end:
                    continue
                look = measure(path, now) if may_show(path) else Look(now, problem=LINKED)
                known[name] = look
            seen[name] = look
    return seen


def measure(path: Path, now: str) -> Look:
    """Decode and measure a file; a clip by its first frame."""
    try:
        clip = probe_clip(path) if is_clip(path) else None
        picture = next(iter(frames_of(path, 1, 1.0, clip)))
    except MediaError as error:
        return Look(now, problem=str(error))
    grid = colour_grid(picture)
    if clip is not None:
        # A frame of a clip is soft where something moves.
        return Look(now, (clip.width, clip.height), clip, grid=grid)
    pixels = brightness_of(picture)
    if pixels is None:
        return Look(now, picture.size, grid=grid)
    contrast = edge_contrast(pixels)
    is_blurred = contrast < MOST_CONTRAST and softness(pixels) > LEAST_SOFTNESS
    return Look(now, picture.size, contrast=contrast, is_blurred=is_blurred, grid=grid)


def brightness_of(picture: Image.Image) -> NDArray[np.float32] | None:
    """The brightness at the size at which blur is measured, `H W`; None if it is too small."""
    shorter = min(picture.size)
    if shorter < SMALLEST_MEASURED:
        return None
    grey = picture.convert("L")
    if shorter > MEASURED_SIDE:
        width, height = (side * MEASURED_SIDE // shorter for side in picture.size)
        grey.thumbnail((width, height), Image.Resampling.BOX)
    return np.asarray(grey, dtype=np.float32)


def edge_contrast(pixels: NDArray[np.float32]) -> float:
    """The Laplacian at the sharpest edges, of tiles of which a tenth is sharper; of 1,020.

    By tiles, since a portrait before a blurred background is in focus.

    Args:
        pixels: brightness, 0..255, `H W`.
    """
    neighbours = pixels[:-2, 1:-1] + pixels[2:, 1:-1] + pixels[1:-1, :-2] + pixels[1:-1, 2:]
    laplacian = np.abs(neighbours - 4 * pixels[1:-1, 1:-1])
    sharpest = []
    for row in np.array_split(laplacian, TILES):
        for tile in np.array_split(row, TILES, axis=1):
            sharpest.append(np.percentile(tile, 99))
    return float(np.percentile(sharpest, 90))


def softness(pixels: NDArray[np.float32]) -> float:
    """The share of the changes between neighbours that a further blur leaves, 0..1.

    It is high in a blurred picture. Crete et al., "The blur effect", SPIE 2007.
    """
    return max(_softness_across(pixels), _softness_across(pixels.T))


def _softness_across(pixels: NDArray[np.float32]) -> float:
    sums = np.cumsum(np.pad(pixels, ((0, 0), (REBLUR, 0))), axis=1)
    blurred = (sums[:, REBLUR:] - sums[:, :-REBLUR]) / REBLUR
    changes = np.abs(np.diff(pixels, axis=1))[:, REBLUR:]
    changes_left = np.abs(np.diff(blurred, axis=1))[:, REBLUR:]
    total = float(changes.sum())
    if total == 0:
        return 0.0
    lost = np.maximum(0, changes - changes_left).sum()
    return float((total - lost) / total)


def blurred_among(looks: Mapping[str, Look]) -> set[str]:
    """The blurred files; none if most seem to be, which is a style."""
    blurred = {name for name, look in looks.items() if look.is_blurred}
    if len(blurred) > MOST_BLURRED * len(looks):
        return set()
    return blurred


def duplicates_among(
    folder: Path, looks: Mapping[str, Look], excluded: frozenset[str]
) -> dict[str, str]:
    """The files that show the same as a larger or earlier one, with the name of that one.

    Args:
        looks: of all files in the folder.
        excluded: files that do not count.
    """
    copies: dict[str, str] = {}
    for group in _duplicate_groups(folder, looks):
        members = sorted((name for name in group if name not in excluded), key=_by_size(looks))
        for copy in members[1:]:
            copies[copy] = members[0]
    return copies


def _duplicate_groups(folder: Path, looks: Mapping[str, Look]) -> list[list[str]]:
    """Groups of files that show the same; computed once, since thousands take seconds."""
    version = hash(tuple((name, look.stamp) for name, look in sorted(looks.items())))
    known = _groups.get(folder)
    if known is None or known[0] != version:
        names = [name for name, look in looks.items() if look.grid is not None]
        grids = [look.grid for look in looks.values() if look.grid is not None]
        groups = [[names[index] for index in group] for group in near_duplicates(grids)]
        known = (version, groups)
        _groups[folder] = known
    return known[1]


def _by_size(looks: Mapping[str, Look]) -> Callable[[str], tuple[int, str]]:
    """A key that sorts the largest file first, and equal ones by name."""

    def key(name: str) -> tuple[int, str]:
        width, height = looks[name].size
        return -width * height, name

    return key
