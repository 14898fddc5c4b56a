"""The size and length at which the files of a folder are trained, and files too small for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from simpletuner.data.clips import fitting_frames
from simpletuner.errors import counted, shorten

# Percent of files that may be left out because they are smaller or shorter than the others. If more
# are, all files are trained at a smaller size or length.
MOST_LEFT_OUT = 25
# Files that are left out, by name.
MOST_NAMED = 3
# A file that is enlarged by so little shows no blur.
ACCEPTED_ENLARGEMENT = 1.1
# Resolutions are multiples of the step; below the smallest one, models render little.
SIZE_STEP = 64
SMALLEST_SIZE = 256


@dataclass(frozen=True)
class Fit:
    """What suits the files of a folder.

    Attributes:
        noun: pictures or clips.
        files: number of files whose size is known.
        resolution: the edge of a square of the trained area.
        usual_resolution: the resolution that the model is trained at.
        small: files that are left out because they are smaller.
        frames: length of the trained clips; 1 for pictures.
        usual_frames: the length that the model is trained at.
        short: clips that are left out because they are shorter.
        smallest: a resolution that enlarges no file, but for tiny ones.
    """

    noun: str
    files: int
    resolution: int
    usual_resolution: int
    small: Sequence[str] = ()
    frames: int = 1
    usual_frames: int = 1
    short: Sequence[str] = ()
    smallest: int = SMALLEST_SIZE

    @property
    def left_out(self) -> set[str]:
        """The files that are left out."""
        return {*self.small, *self.short}

    @property
    def minimum_size(self) -> int:
        """The size below which files are left out; 0 if none is."""
        if not self.small:
            return 0
        return int(self.resolution / ACCEPTED_ENLARGEMENT)

    def notes(self, *, with_remedies: bool = True) -> Iterator[str]:
        """A sentence for everything that differs from the model's usual size and length.

        Args:
            with_remedies: add how to choose otherwise in `start`.
        """
        for fact, remedy, _ in self._notes():
            yield f"{fact} {remedy}" if with_remedies else fact

    def page_notes(self) -> Iterator[str]:
        """The same sentences with remedies on the page, where files are left out by a click."""
        for fact, _, remedy in self._notes():
            yield f"{fact} {remedy}".strip()

    def _notes(self) -> Iterator[tuple[str, str, str]]:
        """Facts, their remedies in a terminal, and those on the page."""
        if self.resolution < self.usual_resolution:
            yield (
                f"Trained at {self.resolution}x{self.resolution} pixels: too many of the "
                f"{self.noun} are smaller than {self.usual_resolution}x{self.usual_resolution}.",
                "For that size, take the small ones out of the folder, or enlarge them with "
                f"resolution={self.usual_resolution}.",
                "For that size, leave the small ones out.",
            )
        if self.small:
            yield (
                f"Left out: {self._share(self.small)} smaller than "
                f"{self.resolution}x{self.resolution}, and would be learned as blur.",
                f"To train them too, {self._size_with_small}.",
                "",
            )
        if self.frames < self.usual_frames:
            yield (
                f"Trained on {counted(self.frames, 'frame')} of each clip instead of "
                f"{self.usual_frames}: too many clips are shorter.",
                "For longer ones, take the short clips out of the folder.",
                "For longer ones, leave the short clips out.",
            )
        if self.short:
            yield (
                f"Left out: {self._share(self.short)} shorter than "
                f"{counted(self.frames, 'frame')}.",
                "To train them too, lower num_frames and min_frames in multidatabackend.json.",
                "",
            )

    @property
    def _size_with_small(self) -> str:
        """How to train the small files too: all at their size, or enlarged if it is too small."""
        if self.smallest < self.resolution:
            return f"at a smaller size for all, add resolution={self.smallest}"
        return f"enlarged, add resolution={self.resolution}"

    def _share(self, names: Sequence[str]) -> str:
        verb = "is" if len(names) == 1 else "are"
        return f"{len(names)} of {self.files} {self.noun} ({shorten(names, MOST_NAMED)}) {verb}"


def fit_size(edges: Mapping[str, int], usual_resolution: int) -> tuple[int, list[str]]:
    """The trained resolution, and the files that are left out because they are smaller.

    Args:
        edges: by file, the edge of the square that can be cut from it, or that has its area.
        usual_resolution: the resolution that the model is trained at.
    """
    edge_of_most = _exceeded_by_most(edges.values(), usual_resolution)
    # Slight enlargement is better than a size that the model was not trained at.
    resolution = usual_resolution
    if edge_of_most * ACCEPTED_ENLARGEMENT < usual_resolution:
        resolution = min(usual_resolution, rounded_size(edge_of_most))
    if edge_of_most * ACCEPTED_ENLARGEMENT < resolution:
        return resolution, []  # all are tiny, and enlarged
    small = [name for name, edge in edges.items() if edge * ACCEPTED_ENLARGEMENT < resolution]
    return resolution, small


def fit_length(lengths: Mapping[str, int], usual_frames: int, stride: int) -> tuple[int, list[str]]:
    """The number of trained frames, and the clips that are left out because they are shorter.

    Args:
        lengths: frames by clip, at the frame rate of the model.
        usual_frames: the length that the model is trained at.
        stride: number of frames that make a latent frame.
    """
    # Stills, saved as clips of a few frames, must not shorten all clips.
    moving = {name: length for name, length in lengths.items() if length > stride} or lengths
    length_of_most = _exceeded_by_most(moving.values(), usual_frames)
    frames = fitting_frames(min(usual_frames, length_of_most), stride)
    return frames, [name for name, length in lengths.items() if length < frames]


def rounded_size(edge: int) -> int:
    """A resolution that does not enlarge a file with this edge, unless it is tiny."""
    return max(SMALLEST_SIZE, edge // SIZE_STEP * SIZE_STEP)


def _exceeded_by_most(values: Iterable[int], otherwise: int) -> int:
    """The value that at most `MOST_LEFT_OUT` percent are below; `otherwise` without values."""
    ordered = sorted(values)
    if not ordered:
        return otherwise
    return ordered[len(ordered) * MOST_LEFT_OUT // 100]
