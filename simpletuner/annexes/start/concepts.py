"""Folders named as kohya's scripts expect: `10_zkt woman` is seen ten times in an epoch.

Its pictures are of `zkt woman`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simpletuner.data.discovery import Scan
from simpletuner.data.file_names import concept_of
from simpletuner.errors import counted, shorten

# Names of folders in a path to regularisation pictures.
REGULARISATION = frozenset({"reg", "regs", "regularization", "regularisation", "class"})
MOST_NAMED = 3  # files that are listed by name


@dataclass(frozen=True)
class Concept:
    """A folder with repeats and words in its name.

    Attributes:
        folder: its path below the dataset's folder; `.` for the dataset's folder.
        title: its name.
        files: its pictures or clips and their captions, by names below the dataset's folder.
    """

    folder: str
    title: str
    repeats: int
    words: str
    files: Scan

    @property
    def inner(self) -> Scan:
        """The files by their names below the concept's folder."""
        if self.folder == ".":
            return self.files
        prefix = f"{self.folder}/"
        start = len(prefix)
        # Pictures and captions are those of this folder only, unlike tables and ignored files.
        names = tuple(name[start:] for name in self.files.files)
        captions = {name[start:]: text[start:] for name, text in self.files.captions.items()}
        metadata = tuple(name[start:] for name in self.files.metadata if name.startswith(prefix))
        ignored = {
            name[start:]: reason
            for name, reason in self.files.ignored.items()
            if name.startswith(prefix)
        }
        return Scan(names, captions, metadata, ignored)


def find_concepts(root: Path, files: Scan) -> tuple[list[Concept], list[str]]:
    """The concepts of a folder, those with most files first, and sentences about them.

    There are none if most files are outside of such folders.

    Args:
        files: of the folder `root`.
    """
    folders: dict[str, list[str]] = {}
    for name in files.files:
        folders.setdefault(name.rpartition("/")[0] or ".", []).append(name)

    concepts: list[Concept] = []
    untrained: list[str] = []
    for folder, names in folders.items():
        title = (root / folder).resolve().name
        parsed = concept_of(title)
        if parsed is None or _is_regularisation(folder):
            untrained += names
        else:
            repeats, words = parsed
            concepts.append(Concept(folder, title, repeats, words, only(files, names)))
    if len(untrained) * 2 > len(files.files):
        return [], []

    concepts.sort(key=lambda concept: len(concept.files.files), reverse=True)
    notes = [_describe(concept) for concept in concepts]
    if concepts and untrained:
        count = counted(len(untrained), "file")
        notes.append(
            f"Not trained: {count} outside of such folders or in regularisation folders "
            f"({shorten(untrained, MOST_NAMED)})."
        )
    return concepts, notes


def _is_regularisation(folder: str) -> bool:
    """Whether a folder, or one above it, holds regularisation pictures."""
    names = {part.lower() for part in Path(folder).parts}
    return not REGULARISATION.isdisjoint(names)


def files_of_concepts(files: Scan, concepts: Sequence[Concept]) -> Scan:
    """The files of all concepts."""
    names: list[str] = []
    for concept in concepts:
        names += concept.files.files
    return only(files, sorted(names))


def only(files: Scan, names: Sequence[str]) -> Scan:
    """Only the pictures or clips with these names, and their captions."""
    captions = {name: files.captions[name] for name in names if name in files.captions}
    return replace(files, files=tuple(names), captions=captions)


def _describe(concept: Concept) -> str:
    times = "once" if concept.repeats == 1 else f"{concept.repeats} times"
    count = counted(len(concept.files.files), "file")
    return (
        f"Taken from the name of the folder {concept.title!r}: {count}, seen {times} in an epoch "
        f"(repeats {concept.repeats - 1}); the words {concept.words!r}."
    )
