"""What a folder holds: pictures, clips or pairs of pictures, their captions, and what can be learned from them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from simpletuner.budget.device import find_device
from simpletuner.data.captions import read_caption_file
from simpletuner.data.clips import CLIP_SUFFIXES, ClipFacts, fitting_frames, probe_clip
from simpletuner.data.discovery import Scan, is_readable, pair_key, scan
from simpletuner.data.files import LeftOutError, MediaError
from simpletuner.data.media import probe
from simpletuner.errors import UserError

# The example whose settings each model starts from; the one that suits most people comes first.
PICTURES = ("kandinsky5-image-lora",)
EDITS = ("kandinsky5-image-edit-lora",)
# Models that train in minutes on a CPU; they draw nothing but simple shapes, and show what happens.
DEMOS = {True: "demo-video", False: "demo"}  # of clips, of pictures
CLIPS = ("kandinsky5-video-lite-lora", "sanavideo-lora", "kandinsky5-video-pro-lora")
# What can be learned, and the example of the model that usually learns it.
PURPOSES = {"subject": PICTURES[0], "style": PICTURES[0], "motion": CLIPS[0], "edit": EDITS[0]}
# Names of two folders with the pictures of edits.
PAIRS = (("before", "after"), ("source", "target"), ("input", "output"))
LOOKED_AT = 200  # files, for their sizes and lengths; a folder may hold thousands
SMALL_ONES = 10  # of a hundred files, so many may be smaller or shorter than what is trained
UNSEEN_ENLARGEMENT = 1.1
SIZE_STEP, SMALLEST_SIZE = 64, 256  # of the resolution; below, a model draws little that can be recognised


@dataclass(frozen=True)
class Material:
    """What a folder holds.

    Attributes:
        folder: of what is trained.
        files: pictures or clips, and their caption files.
        holds_clips: they are clips.
        sources: the folder of the pictures that edits start from.
    """

    folder: Path
    files: Scan
    holds_clips: bool = False
    sources: Path | None = None

    @classmethod
    def of(cls, folder: Path, *, mixed: bool = False) -> Material:
        """Look at a folder.

        Args:
            mixed: of pictures beside clips, take what there is more of; the others are ignored.

        Raises:
            UserError: it holds nothing to train on, or pictures beside clips.
        """
        if not is_readable(folder):
            raise UserError(f"{folder} cannot be read." if folder.is_dir() else f"{folder} is not a folder.")
        if pair := _pair(folder):
            if not (pictures := scan(pair[1])).files:
                raise UserError(f"{pair[1]} holds no pictures.")
            return cls(pair[1], pictures, sources=pair[0])
        pictures, clips = scan(folder), scan(folder, CLIP_SUFFIXES)
        if pictures.files and clips.files and not mixed:
            counts = f"pictures ({len(pictures.files)}) and clips ({len(clips.files)})"
            raise UserError(f"{folder} holds {counts}; give each a folder of its own, and start with one of them.")
        if not pictures.files and not clips.files:
            config = folder / "config.json"
            hint = f" It has a config: simpletuner train --config {config}." if config.is_file() else ""
            raise UserError(f"{folder} holds no pictures and no clips.{hint}")
        holds_clips = len(clips.files) > len(pictures.files)
        return cls(folder, clips if holds_clips else pictures, holds_clips)

    @property
    def noun(self) -> str:
        return "clips" if self.holds_clips else "pictures"

    @property
    def models(self) -> Sequence[str]:
        """Examples of models that can learn from it; without a GPU also one to try everything with."""
        if self.sources:
            return EDITS
        demo = [] if find_device().is_gpu else [DEMOS[self.holds_clips]]
        return [*(CLIPS if self.holds_clips else PICTURES), *demo]

    @property
    def purposes(self) -> Sequence[str]:
        """What it may be for, the likeliest first."""
        if self.sources:
            return ("edit",)
        return ("motion", "subject", "style") if self.holds_clips else ("subject", "style")

    @cached_property
    def captioned(self) -> list[str]:
        return [name for name in self.files.files if pair_key(name) in self.files.captions]

    @cached_property
    def uncaptioned(self) -> list[str]:
        names = (name for name in self.files.files if pair_key(name) not in self.files.captions)
        return [name for name in names if (self.folder / name).is_file()]  # no link to nowhere

    def mentions(self, words: str) -> bool:
        """Whether most captions contain these words."""
        captions = []
        for name in dict.fromkeys([*self.files.captions.values()][:LOOKED_AT]):
            with suppress(LeftOutError):
                captions.append(" ".join(read_caption_file(self.folder / name)))
        whole = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)", re.IGNORECASE)
        return sum(map(bool, map(whole.search, captions))) * 2 > len(captions)

    @cached_property
    def clips(self) -> list[ClipFacts]:
        """The facts of readable clips; the plan tells what is wrong with the others."""
        facts = []
        for name in self.files.files[:LOOKED_AT]:
            with suppress(MediaError):
                facts.append(probe_clip(self.folder / name))
        return facts

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of readable files, the smallest first."""
        if self.holds_clips:
            return sorted(((clip.width, clip.height) for clip in self.clips), key=math.prod)
        sizes = []
        for name in self.files.files[:LOOKED_AT]:
            with suppress(MediaError):
                sizes.append(probe(self.folder / name))
        return sorted(sizes, key=math.prod)

    def resolution(self, largest: int, *, square: bool) -> int:
        """The edge of a square with as many pixels as are trained, so that few files are enlarged.

        Args:
            square: the files are cropped to one.
        """
        edges = sorted(min(size) if square else math.isqrt(math.prod(size)) for size in self.sizes) or [largest]
        edge = edges[len(edges) * SMALL_ONES // 100]
        # A little larger is better than a size that the model was not trained at.
        is_enough = edge * UNSEEN_ENLARGEMENT >= largest
        return largest if is_enough else min(largest, max(SMALLEST_SIZE, edge // SIZE_STEP * SIZE_STEP))

    def frames(self, rate: float, stride: int, longest: int) -> int:
        """How many frames to train, so that few clips are too short."""
        lengths = sorted(clip.frames_at(rate) for clip in self.clips) or [longest]
        return fitting_frames(min(longest, lengths[len(lengths) * SMALL_ONES // 100]), stride)

    def describe(self) -> str:
        """One line."""
        sources = f", each with a picture in {self.sources.name}" if self.sources else ""
        sizes = " to ".join(dict.fromkeys(f"{width}x{height}" for width, height in (*self.sizes[:1], *self.sizes[-1:])))
        seconds = sorted(clip.seconds for clip in self.clips) if self.holds_clips else []
        lengths = " to ".join(dict.fromkeys(f"{each:.1f}" for each in (*seconds[:1], *seconds[-1:])))
        facts = [f"{len(self.files.files)}{sources}", sizes, lengths and f"{lengths} s"]
        return f"{self.noun}: {', '.join(filter(None, facts))}; with a caption: {len(self.captioned)}"


def _pair(folder: Path) -> tuple[Path, Path] | None:
    """The folders of the pictures before and after an edit, if these are below the folder."""
    inner = {path.name.lower(): path for path in folder.iterdir() if path.is_dir()}
    return next(((inner[before], inner[after]) for before, after in PAIRS if before in inner and after in inner), None)
