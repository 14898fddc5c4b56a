"""The files of a folder that a new run would not train, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from simpletuner.annexes.start.media_folder import MediaFolder
from simpletuner.annexes.start.new_run import NewRun
from simpletuner.errors import counted

# A run that leaves out more than one file in this many is started only with the user's consent.
SHARE = 5


@dataclass(frozen=True)
class LeftOut:
    """The files that would not be trained.

    Attributes:
        noun: pictures or clips.
        files: number of all files.
        reasons: number of files by reason, as a text that continues the number.
    """

    noun: str
    files: int
    reasons: Mapping[str, int]

    @property
    def count(self) -> int:
        return sum(self.reasons.values())

    @property
    def trained(self) -> int:
        return self.files - self.count

    @property
    def is_much(self) -> bool:
        """Whether so many are left out that the user is asked."""
        return self.count * SHARE > self.files

    def describe(self) -> str:
        """`14 of 26 pictures would be left out: 12 without a caption, 2 too small.`"""
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.reasons.items())
        return (
            f"{self.count} of {counted(self.files, self.noun[:-1])} would be left out: {reasons}."
        )


def find_left_out(media: MediaFolder, run: NewRun) -> LeftOut:
    """The files that a run would not train; each counts once, with its first reason.

    Args:
        media: the folder with all its files, including those without a caption.
        run: trains some or all of them.
    """
    groups: dict[str, Collection[str]] = {
        "left out by you": media.excluded,
        "unreadable": media.unusable,
        "without a caption": {*media.files.files} - {*run.media.files.files},
        "too small": run.fit.small,
        "too short": run.fit.short,
    }
    counted_before: set[str] = set()
    reasons: dict[str, int] = {}
    for reason, names in groups.items():
        new = {*names} - counted_before
        counted_before |= new
        if new:
            reasons[reason] = len(new)
    return LeftOut(media.noun, len(media.files.files) + len(media.excluded), reasons)
