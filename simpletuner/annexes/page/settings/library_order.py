"""The order of the files of a dataset on the page, by what can be read or measured in time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from PIL import Image

from simpletuner.annexes.captions.library import Library
from simpletuner.annexes.page.new.drop_looks import look_at, stamp
from simpletuner.data.clips import is_clip, probe_clip
from simpletuner.data.files import MediaError

# By the word in the address; the first is the default.
ORDERS = {
    "": "Name",
    "uncaptioned": "No caption first",
    "longest": "Longest caption",
    "smallest": "Smallest picture",
    "blurriest": "Blurriest picture",
}
OF_CAPTIONS = ("uncaptioned", "longest")  # orders that need captions of their own
SECONDS = 3.0  # spent on reading and measuring in a request
UNMEASURED = float("inf")

# Pixels by path, with the stamp of the file at which they were read.
_pixels: dict[Path, tuple[str, int]] = {}


def in_order(library: Library, names: Sequence[str], order: str) -> tuple[list[str], int]:
    """Files in an order, and how many could not be compared in time; those are the last.

    Args:
        order: a key of `ORDERS`; an unknown one leaves the files as they are.
    """
    end = time.monotonic() + SECONDS
    if order == "blurriest":
        values = _sharpness(library, names)
    elif order == "smallest":
        values = dict(_sizes(library, names, end))
    elif order in OF_CAPTIONS:
        values = dict(_caption_values(library, names, order, end))
    else:
        return list(names), 0
    # Sorting keeps the order of names among equals.
    ordered = sorted(names, key=lambda name: values.get(name, UNMEASURED))
    return ordered, len(names) - len(values)


def _caption_values(
    library: Library, names: Sequence[str], order: str, end: float
) -> Iterator[tuple[str, float]]:
    for name in names:
        if time.monotonic() > end:
            return
        length = len(library.text_of(name).strip())
        yield name, bool(length) if order == "uncaptioned" else -length


def _sizes(library: Library, names: Sequence[str], end: float) -> Iterator[tuple[str, float]]:
    """Pixels of files, from their headers; none for what cannot be read, which is not small."""
    for name in names:
        if time.monotonic() > end:
            return
        path = library.root / name
        pixels = pixels_in_header(path) if library.may_show(path) else 0
        yield name, pixels or UNMEASURED


def pixels_in_header(path: Path) -> int:
    """Width times height of a picture or clip; 0 if it cannot be read."""
    now = stamp(path)
    known = _pixels.get(path)
    if known is None or known[0] != now:
        known = _pixels[path] = (now, _read_pixels(path))
    return known[1]


def _read_pixels(path: Path) -> int:
    try:
        if is_clip(path):
            clip = probe_clip(path)
            return clip.width * clip.height
        with Image.open(path) as picture:
            return picture.width * picture.height
    except (MediaError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return 0


def _sharpness(library: Library, names: Sequence[str]) -> dict[str, float]:
    """Contrast of the sharpest edges; of clips and unreadable files it is not measured."""
    looks = look_at(library.root, names, SECONDS, library.may_show)
    return {
        name: UNMEASURED if look.contrast is None else look.contrast for name, look in looks.items()
    }
