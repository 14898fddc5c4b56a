"""Folders named as kohya's scripts expect: `10_zkt woman` holds pictures of `zkt woman`, seen ten
times in an epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simpletuner.data.discovery import Scan
from simpletuner.data.file_names import concept_of
from simpletuner.errors import counted, shorten

REGULARISATION = frozenset(
    {"reg", "regs", "regularization", "regularisation", "class"}
)  # parts of a path
MOST_NAMED = 3


@dataclass(frozen=True)
class Concept:
    """A folder with repeats and words in its name.

    Attributes:
        folder: its path below the folder that was given, `.` for that one.
        title: its name.
        files: its pictures or clips and their captions, by names below the folder that was given.
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
        start = len(self.folder) + 1
        captions = {name[start:]: text[start:] for name, text in self.files.captions.items()}
        names = tuple(name[start:] for name in self.files.files)
        metadata = tuple(
            name[start:] for name in self.files.metadata if name.startswith(f"{self.folder}/")
        )
        ignored = {
            name[start:]: why
            for name, why in self.files.ignored.items()
            if name.startswith(f"{self.folder}/")
        }
        return Scan(names, captions, metadata, ignored)


def find_concepts(root: Path, files: Scan) -> tuple[list[Concept], list[str]]:
    """The concepts that hold most of the files, those with most files first, and sentences about
    other files.

    Args:
        files: of the folder `root`.
    """
    folders: dict[str, list[str]] = {}
    for name in files.files:
        folders.setdefault(name.rpartition("/")[0] or ".", []).append(name)
    concepts: list[Concept] = []
    others: list[str] = []
    for folder, names in folders.items():
        title = (root / folder).resolve().name
        parsed = concept_of(title)
        is_regularisation = not REGULARISATION.isdisjoint(
            part.lower() for part in Path(folder).parts
        )
        if parsed is None or is_regularisation:
            others += names
        else:
            concepts.append(Concept(folder, title, *parsed, _only(files, names)))
    if len(others) * 2 > len(files.files):
        return [], []
    concepts.sort(key=lambda concept: len(concept.files.files), reverse=True)
    notes = [_described(concept) for concept in concepts]
    if concepts and others:
        count = (
            f"{counted(len(others), 'file')} outside of such folders or in regularisation folders"
        )
        notes.append(f"Not trained: {count} ({shorten(others, MOST_NAMED)}).")
    return concepts, notes


def together(files: Scan, concepts: Sequence[Concept]) -> Scan:
    """The files of all concepts."""
    return _only(files, sorted(name for concept in concepts for name in concept.files.files))


def _only(files: Scan, names: Sequence[str]) -> Scan:
    captions = {name: files.captions[name] for name in names if name in files.captions}
    return replace(files, files=tuple(names), captions=captions)


def _described(concept: Concept) -> str:
    times = "once" if concept.repeats == 1 else f"{concept.repeats} times"
    seen = (
        f"{counted(len(concept.files.files), 'file')}, seen {times} in an epoch (repeats "
        f"{concept.repeats - 1})"
    )
    return (
        f"Taken from the name of the folder {concept.title!r}: {seen}; the words {concept.words!r}."
    )
