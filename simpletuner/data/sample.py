"""A file that is trained is a `Sample`; one that is left out is a `Rejected` with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from simpletuner.config.types import Size
from simpletuner.data.buckets import Geometry, cover
from simpletuner.data.clips import ClipFacts, frames_of
from simpletuner.data.file_names import UNREAD

# Reasons of files whose caption is missing or cannot be read.
UNCAPTIONED = ("no caption", "unreadable caption")
# Reasons of files that another dataset would train.
CLIP = "clip among pictures"
PICTURE = "picture among clips"
# The reason of files that are evaluated instead, in the dataset that `hold_out` splits off.
HELD_OUT = "held out"
# What to do about the files of a reason.
ADVICE = {
    UNREAD: "Save such pictures as .png or .jpg, and such clips as .mp4.",
    CLIP: "Clips are trained by a video model, from a dataset of dataset_type video.",
    PICTURE: "Pictures are trained from a dataset of dataset_type image.",
}
# Reasons of files that are neither pictures nor clips of the dataset.
NOT_MEDIA = {
    "not a picture",
    "not a clip",
    "caption without a file",
    "unused caption",
    "hidden",
}
# Reasons that are normal in any folder or follow from the config; the ledger lists such files, and
# no warning names them.
EXPECTED = {*NOT_MEDIA, "not chosen"}

# Relative error of rates measured in containers that round times.
RATE_TOLERANCE = 5e-4


# Not frozen: a start may create 100,000, and a frozen dataclass takes twice as long.
@dataclass(slots=True)
class Sample:
    """One picture or clip as it is trained.

    Attributes:
        dataset_id: id of the sample's dataset.
        name: path below the dataset's folder, with `/`, spelled as on disk.
        root: the dataset's folder.
        content: SHA-256 of the file's bytes in hex.
        original_size: width and height in pixels as shown, after any rotation.
        geometry: training size and crop.
        captions: one is drawn per use; empty for partners.
        partner: the paired picture of a conditioning dataset, or None.
        mask: the loss mask, a picture or a clip of the same frames, with the same geometry; or
            None.
        frames: number of trained frames, starting with the first.
        frame_rate: frames per second at which the clip is sampled; None for pictures.
        clip: facts of the clip; None for pictures.
        is_i2v: frame 0 is the condition for the other frames.
        conversions: changes to a picture that its file asks for and that earlier versions did not
            make, such as "converted to sRGB"; part of the cache key, so that only such pictures are
            encoded again.
        is_segmentation: a mask in which every area that is not black counts as white.
    """

    dataset_id: str
    name: str
    root: Path
    content: str
    original_size: Size
    geometry: Geometry
    captions: tuple[str, ...] = ()
    partner: Sample | None = None
    mask: Sample | None = None
    frames: int = 1
    frame_rate: float | None = None
    clip: ClipFacts | None = None
    is_i2v: bool = False
    is_segmentation: bool = False
    conversions: tuple[str, ...] = ()

    def __hash__(self) -> int:
        # Samples are keys of large tables, and few of them share both fields.
        return hash((self.dataset_id, self.name))

    @property
    def path(self) -> Path:
        """Full path of the file."""
        return self.root / self.name

    def images(self, background: str = "white") -> Iterator[Image.Image]:
        """The picture, or the trained frames of the clip, at their original size.

        Raises:
            MediaError: the file is damaged or cannot be read.
        """
        return frames_of(self.path, self.frames, self.frame_rate or 1, self.clip, background)

    @property
    def first_frame(self) -> Sample:
        """Frame 0 as a clip of one frame, without a condition."""
        return replace(self, frames=1, is_i2v=False)

    def fitted(self, size: Size) -> Sample:
        """The sample resized and centre-cropped to another size."""
        if size == self.geometry.size:
            return self
        resized = cover(self.original_size, size)
        width, height = size
        left = (resized.width - width) // 2
        top = (resized.height - height) // 2
        return replace(self, geometry=Geometry(self.geometry.bucket, size, resized, (left, top)))

    @property
    def read_as(self) -> tuple[str, ...]:
        """Assumptions about the file that differ from its metadata or from earlier versions.

        For a picture its `conversions`; for a clip a corrected speed, and BT.709 for untagged
        colours. Empty for BT.601, the default for untagged colours.
        """
        if self.clip is None or self.frame_rate is None:
            return self.conversions
        assumptions: list[str] = []
        slowed = 1.0
        if self.frames > 1:  # a single frame has no speed
            slowed = self.clip.slowed(self.frame_rate)
        # Part of the cache key: a change of wording or digits would re-encode these clips.
        if abs(slowed - 1) > RATE_TOLERANCE:
            assumptions.append(f"{self.clip.source_rate * slowed:.6g} frames a second")
        if self.clip.matrix == "bt709":
            assumptions.append("BT.709")
        return tuple(assumptions)

    @property
    def full_name(self) -> str:
        """`dataset/relative path`, unique in a run, for messages."""
        return f"{self.dataset_id}/{self.name}"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A file that is left out: the category of the reason, and a detail.

    The detail continues the file's name.
    """

    dataset_id: str
    name: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One line of the plan: a file and how it is used.

    A trained file has a geometry and an empty `use`; otherwise `use` is the reason why the file is
    left out. `note` is an assumption made about the file.
    """

    dataset_id: str
    name: str
    use: str = ""
    note: str = ""
    original_size: Size | None = None
    geometry: Geometry | None = None
    captions: int = 0
    frames: int = 1

    @property
    def trained_size(self) -> str:
        """`shape_text` of its geometry."""
        if self.geometry is None:
            return ""
        return shape_text(self.geometry.bucket, self.geometry.size, self.frames)


def shape_text(bucket: str, size: Size, frames: int) -> str:
    """`80x48 (1.5)`, with frames `80x48@17 (1.5)`; a bucket of the same text is omitted."""
    text = size.of_frames(frames)
    return text if bucket == text else f"{text} ({bucket})"
