"""The content of a folder of pictures or clips: files, sizes, captions, and unusable files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from simpletuner.annexes.start.captions import MOST_NAMED, MOST_OPENED, FolderCaptions
from simpletuner.annexes.start.concepts import Concept, files_of_concepts, find_concepts, only
from simpletuner.annexes.start.sizes import Fit, fit_length, fit_size, rounded_size
from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.paths import similar_path
from simpletuner.data.clips import CLIP_SUFFIXES, ClipFacts, probe_clip
from simpletuner.data.discovery import Scan, is_readable, read_excluded, scan
from simpletuner.data.file_names import UNREAD
from simpletuner.data.files import MediaError
from simpletuner.data.pictures import probe
from simpletuner.data.sample import ADVICE
from simpletuner.errors import Problems, UserError, counted, escape_controls, shorten
from simpletuner.models.spec import FamilySpec

# `pairs`: pictures before and after an edit.
Kind = Literal["pictures", "clips", "pairs"]
# Names of the folders with pictures before and after an edit.
PAIRS = (("before", "after"), ("source", "target"), ("input", "output"))
# The usual list of files that the user leaves out, in the folder of a dataset.
EXCLUDED = str(DatasetConfig.model_fields["exclude_files"].default)
WHY_EXCLUDED = f"is left out by {EXCLUDED}"
NOT_CHOSEN = "not chosen"  # the reason of these files in `Scan.ignored`


@dataclass(frozen=True)
class OpenedFiles:
    """The facts of the first `MOST_OPENED` files of a folder, read from the files themselves.

    Attributes:
        sizes: width and height in pixels, by name.
        clips: the facts of clips, by name; empty for pictures.
        unreadable: why a file cannot be read, as a text that continues its name.
    """

    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    clips: dict[str, ClipFacts] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class MediaFolder:
    """The training files in a folder.

    Attributes:
        folder: the folder of the trained files.
        files: pictures or clips, and their caption files.
        kind: what the files are.
        sources: the folder of source pictures, for pairs.
        unused: files of the less frequent kind (clips or pictures), which are not trained.
        concepts: folders named as kohya's scripts expect, those with most files first.
        concept_notes: sentences about what was taken from the names of these folders.
    """

    folder: Path
    files: Scan
    kind: Kind = "pictures"
    sources: Path | None = None
    unused: Sequence[str] = ()
    concepts: Sequence[Concept] = ()
    concept_notes: Sequence[str] = ()

    @property
    def holds_clips(self) -> bool:
        return self.kind == "clips"

    @property
    def noun(self) -> str:
        return "clips" if self.holds_clips else "pictures"

    @cached_property
    def parts(self) -> list[MediaFolder]:
        """The files of each concept, or else all files."""
        if not self.concepts:
            return [self]
        return [self._only(concept) for concept in self.concepts]

    def _only(self, concept: Concept) -> MediaFolder:
        folder = self.folder / concept.folder
        return replace(self, folder=folder, files=concept.inner, concepts=(), concept_notes=())

    def captioned_only(self) -> MediaFolder:
        """The folder without the files that lack a caption."""
        return replace(self, files=only(self.files, self.captioned))

    @property
    def excluded(self) -> list[str]:
        """The files that the user leaves out."""
        ignored = self.files.ignored.items()
        return [name for name, (reason, _) in ignored if reason == NOT_CHOSEN]

    @property
    def words(self) -> str:
        """The words of the concept with most files; empty without concepts."""
        return self.concepts[0].words if self.concepts else ""

    @cached_property
    def captions(self) -> FolderCaptions:
        """The captions in the folder."""
        return FolderCaptions(self.folder, self.files)

    @cached_property
    def captioned(self) -> list[str]:
        return [name for name in self.files.files if self.captions.has(name)]

    @cached_property
    def uncaptioned(self) -> list[str]:
        """The files without a caption; unusable ones need none, nor do broken links."""
        uncaptioned = []
        for name in self.files.files:
            needs_caption = name not in self.unusable and not self.captions.has(name)
            if needs_caption and (self.folder / name).is_file():
                uncaptioned.append(name)
        return uncaptioned

    @cached_property
    def opened(self) -> OpenedFiles:
        """The facts of the first files."""
        opened = OpenedFiles()
        for name in self.files.files[:MOST_OPENED]:
            try:
                if self.holds_clips:
                    clip = probe_clip(self.folder / name)
                    opened.clips[name] = clip
                    opened.sizes[name] = (clip.width, clip.height)
                else:
                    opened.sizes[name] = probe(self.folder / name)
            except MediaError as error:
                opened.unreadable[name] = str(error)
        return opened

    @cached_property
    def unusable(self) -> dict[str, str]:
        """Why some of the first files cannot be used, as texts that continue their names."""
        reasons: dict[str, str] = {}
        for name in self.files.files[:MOST_OPENED]:
            reason = self.opened.unreadable.get(name) or self.captions.why_unusable(name)
            if reason:
                reasons[name] = reason
        return reasons

    @property
    def usable(self) -> int:
        """The number of trainable files: all except unusable ones among the first `MOST_OPENED`."""
        return len(self.files.files) - len(self.unusable)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of the files, smallest first."""
        return sorted(self.opened.sizes.values(), key=math.prod)

    def fit(self, entry: Mapping[str, Any], spec: FamilySpec, longest: int) -> Fit:
        """The size and length that suit these files.

        Args:
            entry: the dataset entry of the model's example.
            longest: maximum number of frames.
        """
        usual_resolution = entry["resolution"]
        edges = {name: edge_of(size, entry) for name, size in self.opened.sizes.items()}
        resolution, small = fit_size(edges, usual_resolution)
        smallest = rounded_size(min(edges.values(), default=usual_resolution))
        fit = Fit(self.noun, len(edges), resolution, usual_resolution, small, smallest=smallest)
        if "video" not in entry:
            return fit
        rate = spec.frame_rate or 1
        lengths = {name: clip.frames_at(rate) for name, clip in self.opened.clips.items()}
        frames, short = fit_length(lengths, longest, spec.frame_stride)
        return replace(fit, frames=frames, usual_frames=longest, short=short)

    def fitted(self, entry: Mapping[str, Any], spec: FamilySpec, longest: int) -> dict[str, Any]:
        """A dataset entry with a resolution and a length that suit these files.

        Args:
            longest: maximum number of frames.
        """
        fit = self.fit(entry, spec, longest)
        fitted = {**entry, "resolution": fit.resolution}
        if fit.minimum_size:
            fitted["minimum_image_size"] = fit.minimum_size
        if "video" in entry:
            fitted["video"] = {**entry["video"], "num_frames": fit.frames, "min_frames": fit.frames}
        return fitted

    def describe(self) -> str:
        """The usable files in one line: `26 pictures, 451x300 to 3024x4032, none captioned`."""
        facts = [counted(self.usable, self.noun.removesuffix("s"))]
        if self.sources:
            facts.append(f"each with a picture in {self.sources.name}")
        sizes = [f"{width}x{height}" for width, height in self.sizes]
        if sizes:
            facts.append(_range(sizes[0], sizes[-1]))
        seconds = sorted(clip.seconds for clip in self.opened.clips.values())
        if seconds:
            facts.append(f"{_range(f'{seconds[0]:.1f}', f'{seconds[-1]:.1f}')} s")
        facts.append(self._share_captioned)
        return ", ".join(facts)

    @property
    def _share_captioned(self) -> str:
        """How many of the usable files have a caption."""
        if not self.uncaptioned:
            return "all captioned"
        captioned = self.usable - len(self.uncaptioned)
        return f"{captioned} captioned" if captioned > 0 else "none captioned"

    def notes(self) -> list[str]:
        """Sentences about files that are not trained, and about captions."""
        notes = []
        if self.unused:
            unused = "pictures" if self.holds_clips else "clips"
            advice = (
                f"A run learns from pictures or from clips: to train {unused}, put them into a "
                "separate folder."
            )
            notes.append(f"Not trained, {unused}: {shorten(self.unused, MOST_NAMED)}. {advice}")
        notes += self.concept_notes
        notes += self._about_unusable()
        notes += about_unread(self.files)
        for part in self.parts:
            notes += part.captions.notes()
        return notes

    def _about_unusable(self) -> Iterator[str]:
        """Sentences about the first unusable files, and how many more there are."""
        for name, reason in islice(self.unusable.items(), MOST_NAMED):
            yield f"Not usable: {escape_controls(name)} {reason.removesuffix('.')}."
        more = len(self.unusable) - MOST_NAMED
        if more > 0:
            yield (
                f"Not usable: {counted(more, 'more file')}; `simpletuner plan` lists each with "
                "its reason."
            )


def edge_of(size: tuple[int, int], entry: Mapping[str, Any]) -> int:
    """The edge of the square that a dataset entry cuts from a file, or that has its area."""
    if entry.get("crop_aspect") == "square":
        return min(size)
    return math.isqrt(math.prod(size))


def read_media_folder(folder: Path) -> MediaFolder:
    """The pictures or the clips in a folder, whichever are more, or its pairs of pictures.

    Raises:
        UserError: the folder contains none of them.
    """
    if folder.is_file():
        raise UserError(f"{folder} is a file; name the folder that it is in: {folder.parent}")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder.{similar_path(folder, '*/')}")
    if not is_readable(folder):
        raise UserError(f"{folder} cannot be read.")

    pair = _find_pair(folder)
    if pair is not None:
        before, after = pair
        edited = scan(after)
        if not edited.files:
            raise UserError(f"{after} contains no pictures.")
        return MediaFolder(after, _chosen(edited, after), "pairs", sources=before)

    pictures = scan(folder)
    clips = scan(folder, CLIP_SUFFIXES)
    if not pictures.files and not clips.files:
        raise UserError(_why_empty(folder, pictures))
    if len(clips.files) > len(pictures.files):
        return _with_concepts(MediaFolder(folder, clips, "clips", unused=pictures.files))
    return _with_concepts(MediaFolder(folder, pictures, unused=clips.files))


def about_unread(files: Scan) -> Iterator[str]:
    """A sentence about pictures and clips in formats that are not read."""
    names = [name for name, (reason, _) in files.ignored.items() if reason == UNREAD]
    if names:
        count = counted(len(names), "file")
        yield f"Not read: {count} in other formats ({shorten(names, MOST_NAMED)}). {ADVICE[UNREAD]}"


def _why_empty(folder: Path, pictures: Scan) -> str:
    """Why a folder without pictures and clips cannot be trained, and what may have been meant."""
    sentences = [f"{folder} contains no pictures and no clips."]
    config = folder / "config.json"
    if config.is_file():
        sentences.append(f"It has a config: simpletuner train --config {config}.")
    return " ".join([*sentences, *about_unread(pictures)])


def _find_pair(folder: Path) -> tuple[Path, Path] | None:
    """The folders before and after an edit, if the folder contains such a pair."""
    folders = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    for before, after in PAIRS:
        if before in folders and after in folders:
            return folders[before], folders[after]
    return None


def _with_concepts(media: MediaFolder) -> MediaFolder:
    """The chosen files of the concepts if there are any, or else all chosen files."""
    concepts, notes = find_concepts(media.folder, media.files)
    if not concepts:
        return replace(media, files=_chosen(media.files, media.folder))
    files = files_of_concepts(media.files, concepts)
    chosen = []
    for concept in concepts:
        files = _chosen(files, media.folder, concept.folder)
        kept = {*files.files}
        names = [name for name in concept.files.files if name in kept]
        chosen.append(replace(concept, files=only(concept.files, names)))
    return replace(media, files=files, concepts=chosen, concept_notes=notes)


def _chosen(files: Scan, root: Path, folder: str = ".") -> Scan:
    """The files without those that the user leaves out in a folder of a dataset.

    Args:
        files: of the folder `root`.
        folder: the dataset's folder, below `root`.

    Raises:
        ConfigError: the list of these files cannot be read.
    """
    config = DatasetConfig(id="files", instance_data_dir=str(root / folder))
    report = Problems()
    excluded = read_excluded(config, report)
    report.raise_if_fatal()
    if folder != ".":
        excluded = frozenset(f"{folder}/{name}" for name in excluded)
    left_out = {name: (NOT_CHOSEN, WHY_EXCLUDED) for name in files.files if name in excluded}
    kept = [name for name in files.files if name not in excluded]
    return replace(only(files, kept), ignored={**files.ignored, **left_out})


def _range(first: str, last: str) -> str:
    """A range in words; of equal values only one."""
    return first if first == last else f"{first} to {last}"
