"""The files of a drop, before a run trains them: what is wrong with them, and their captions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simpletuner.annexes.captions import editing
from simpletuner.annexes.page.new.drop_looks import (
    Look,
    blurred_among,
    duplicates_among,
    look_at,
    stamp,
)
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.settings import files
from simpletuner.annexes.start.media_folder import MediaFolder, edge_of
from simpletuner.annexes.start.new_run import NewRun
from simpletuner.annexes.start.sizes import ACCEPTED_ENLARGEMENT
from simpletuner.data.file_names import CAPTION_SUFFIXES
from simpletuner.data.files import LeftOutError

LEFT_OUT = "out"  # the kind of files that the user leaves out
TABLE = "These captions come from a table: change them there."


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file.

    Attributes:
        kind: `unreadable`, `small`, `short`, `blurred`, `duplicate` or `uncaptioned`.
        detail: a size, a length, another file or a reason, in words.
        leaves_out: training leaves the file out for it.
    """

    kind: str
    detail: str = ""
    leaves_out: bool = False


@dataclass(frozen=True)
class DroppedFiles:
    """The files of a folder, with those that the user leaves out.

    Attributes:
        media: the files that are not left out.
        run: the proposed run, whose model decides which files are small or short.
        looks: what was seen so far.
    """

    media: MediaFolder
    run: NewRun
    looks: Mapping[str, Look]

    @cached_property
    def names(self) -> list[str]:
        """All files, sorted."""
        return sorted((*self.media.files.files, *self.media.excluded))

    @cached_property
    def excluded(self) -> frozenset[str]:
        return frozenset(self.media.excluded)

    @property
    def is_complete(self) -> bool:
        """Whether every file has been looked at."""
        return len(self.looks) == len(self.names)

    @cached_property
    def chosen_looks(self) -> dict[str, Look]:
        """The looks of the files that are not left out."""
        return {name: look for name, look in self.looks.items() if name not in self.excluded}

    @cached_property
    def blurred(self) -> set[str]:
        """The blurred files, once every file has been compared."""
        return blurred_among(self.chosen_looks) if self.is_complete else set()

    @cached_property
    def duplicates(self) -> dict[str, str]:
        """The files that show the same as another one, once every file has been compared."""
        if not self.is_complete:
            return {}
        return duplicates_among(self.media.folder, self.looks, self.excluded)

    @cached_property
    def faults(self) -> dict[str, list[Fault]]:
        """What is wrong, by file; empty for files that the user leaves out."""
        return {name: self._faults_of(name) for name in self.names if name not in self.excluded}

    def _faults_of(self, name: str) -> list[Fault]:
        look = self.looks.get(name)
        faults = []
        if look is not None:
            faults += self._faults_seen(look)
        if name in self.blurred:
            faults.append(Fault("blurred"))
        if name in self.duplicates:
            faults.append(Fault("duplicate", self.duplicates[name]))
        if self._needs_captions and not self.media.captions.has(name):
            faults.append(Fault("uncaptioned", leaves_out=True))
        return faults

    def _faults_seen(self, look: Look) -> list[Fault]:
        """What is wrong with a file by its size and length."""
        if look.problem:
            return [Fault("unreadable", look.problem, leaves_out=True)]
        fit = self.run.fit
        faults = []
        # Against the usual size and length of the model: without these files, it would be trained.
        edge = edge_of(look.size, self.run.entry)
        usual = self.run.settings.get("resolution", fit.usual_resolution)
        if edge * ACCEPTED_ENLARGEMENT < usual:
            width, height = look.size
            faults.append(Fault("small", f"{width}x{height}", leaves_out=edge < fit.minimum_size))
        if look.clip is not None:
            rate = self.run.spec.frame_rate or 1
            frames = look.clip.frames_at(rate)
            if frames < fit.usual_frames:
                detail = f"{look.clip.seconds:.1f} s of {fit.usual_frames / rate:.1f} s"
                faults.append(Fault("short", detail, leaves_out=frames < fit.frames))
        return faults

    @property
    def _needs_captions(self) -> bool:
        """Whether files without a caption are left out; else all are trained with the trigger."""
        return bool(self.media.captioned) or self.media.sources is not None

    def of_kind(self, kind: str) -> list[str]:
        """The files with a fault, or that are left out; all of them for no kind."""
        if not kind:
            return self.names
        if kind == LEFT_OUT:
            return [name for name in self.names if name in self.excluded]
        return [
            name
            for name, faults in self.faults.items()
            if any(fault.kind == kind for fault in faults)
        ]

    def counts(self) -> dict[str, int]:
        """The number of files by kind of fault, and of those that are left out."""
        counts: dict[str, int] = {}
        for faults in self.faults.values():
            for fault in faults:
                counts[fault.kind] = counts.get(fault.kind, 0) + 1
        if self.excluded:
            counts[LEFT_OUT] = len(self.excluded)
        return counts

    def caption_file(self, name: str) -> Path:
        """The caption file of a file, whether or not it exists."""
        beside = Path(name).with_suffix(CAPTION_SUFFIXES[0]).as_posix()
        return self.media.folder / self.media.files.captions.get(name, beside)

    def shown(self, project: Project, name: str) -> dict[str, Any]:
        """A file as the page shows it."""
        look = self.looks.get(name)
        path = self.media.folder / name
        text, locked = self._caption(project, name)
        return {
            "name": name,
            "path": files.shown(project, path),
            "stamp": stamp(path),
            "is_clip": self.media.holds_clips,
            "seconds": look.clip.seconds if look and look.clip else None,
            "out": name in self.excluded,
            "faults": [vars(fault) for fault in self.faults.get(name, ())],
            "text": text,
            "tag": editing.tag_of(text),
            "locked": locked,
        }

    def _caption(self, project: Project, name: str) -> tuple[str | None, str]:
        """The text of the caption file, None without one, and why it cannot be edited."""
        if self.media.captions.is_table:
            return None, TABLE
        path = self.caption_file(name)
        if not project.may_show(path):
            return None, "The caption is behind a link out of the project."
        try:
            return editing.read_caption(path), ""
        except LeftOutError as error:
            return None, f"The caption file {error}."


def dropped_files(
    project: Project, media: MediaFolder, run: NewRun, first: Iterable[str], seconds: float
) -> DroppedFiles:
    """The files of a folder, as far as they are seen in time.

    Args:
        first: files to look at before the others.
        seconds: for decoding.
    """
    everything = DroppedFiles(media, run, {})
    order = dict.fromkeys([*first, *everything.names])
    looks = look_at(media.folder, order, seconds, project.may_show)
    return DroppedFiles(media, run, looks)
