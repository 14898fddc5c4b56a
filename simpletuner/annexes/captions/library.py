"""The files of one dataset as they are trained, some at a time: a folder of a million files is listed, but not read."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from simpletuner.annexes.captions.dataset_page import FileCard, Words, card_of, placed
from simpletuner.annexes.captions.editing import read_caption, tag_of
from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.data import discovery
from simpletuner.data.build import build_datasets
from simpletuner.data.dataset import Dataset
from simpletuner.data.discovery import CAPTION_SUFFIX, FileFacts, Folder, Scan, pair_key
from simpletuner.data.entries import FIXED_PROMPTS, DataContext, link_partners
from simpletuner.data.files import LeftOutError
from simpletuner.data.sample import LedgerEntry, Rejected
from simpletuner.errors import Problems, result_of, visible

PATIENCE = 4.0  # seconds that a search may read captions
AGE = 10  # a listing is used for this many times as long as it took
MOST_LISTINGS = 3
Place = tuple[Path, frozenset[str]]  # a folder, and the extensions of its files
_listings: dict[Place, tuple[float, Scan]] = {}  # until when each is used
_facts: dict[Path, dict[str, FileFacts]] = defaultdict(dict)


@dataclass(frozen=True)
class Mask:
    """Which part of a file is learned.

    Attributes:
        stamp: changes with the content of the mask.
        share: of the file, as far as it is trained; None if it is not.
    """

    path: Path
    stamp: str
    share: float | None

    @classmethod
    def of(cls, dataset: Dataset, name: str) -> Mask | None:
        """The mask of a file of a dataset."""
        if (masks := dataset.masks) is None or (own := masks.name_for(name)) is None:
            return None
        return cls(masks.root / own, stamp_of(masks.facts[own]), dataset.white.get(own))


@dataclass(frozen=True)
class Shown:
    """A file of a dataset.

    Attributes:
        card: its sizes, its crop, its captions as they are trained, and why it is not used.
        stamp: changes with the content of the file.
        text, tag: of its caption file; None if there is none.
        locked: why its caption cannot be edited; empty if it can.
        is_excluded: it was left out by hand, and can be taken back.
        shares: its caption file belongs to another file, too.
        mask: which part of it is learned; None for all.
    """

    card: FileCard
    stamp: str
    text: str | None
    tag: str
    locked: str
    is_clip: bool
    is_excluded: bool
    shares: bool
    mask: Mask | None

    @property
    def name(self) -> str:
        """The name of the file, with control characters escaped."""
        return visible(self.card.name)


Planned = tuple[LedgerEntry, Sequence[str], Mask | None]  # a file as it is trained, its captions and its mask


@dataclass(frozen=True)
class Library:
    """The files of a dataset.

    Attributes:
        entry: with its defaults filled in.
        entries: all of its dataset file, as written.
        context: of the run.
        is_packaged: it belongs to a packaged example.
    """

    entry: DatasetConfig
    entries: Sequence[DatasetConfig]
    context: DataContext
    is_packaged: bool = False

    @property
    def root(self) -> Path:
        """Its folder."""
        return Path(self.entry.instance_data_dir or "")

    @cached_property
    def listing(self) -> Scan:
        """The names of its files and caption files."""
        return list_files(self.entry, self.context)

    @cached_property
    def masks(self) -> DatasetConfig | None:
        """The entry of its masks."""
        links = result_of(link_partners([self.context.fill(each) for each in self.entries], self.context))
        return next((each for each in links.get(self.entry.id, []) if each.conditioning_type in MASKS), None)

    @cached_property
    def excluded(self) -> frozenset[str]:
        """The files that were left out by hand."""
        return result_of(discovery.read_excluded(self.entry))

    @property
    def fixed(self) -> str:
        """Why nothing of it can be changed; empty if something can."""
        if self.is_packaged:
            return "This belongs to a packaged example: copy it to change it."
        if self.entry.type != "local":
            return f"Files and captions come from {self.entry.type}: change them there."
        if self.entry.is_conditioning:
            return "These are partners or masks: their captions are those of the files that they belong to."
        return ""

    @property
    def locked(self) -> str:
        """Why its captions cannot be edited; empty if they can."""
        entry, strategy = self.entry, self.entry.caption_strategy
        if self.fixed:
            return self.fixed
        other = "To caption each file, set Caption Strategy to textfile."
        if entry.only_instance_prompt or strategy in FIXED_PROMPTS:
            return f"Every file is trained with Instance Prompt. {other}"
        if strategy == "filename":
            return f"Each file is captioned by its name. {other}"
        return "" if strategy == "textfile" else f"Captions come from a table: change them there. {other}"

    @property
    def unpaintable(self) -> str:
        """Why no masks can be painted for its files; empty if they can."""
        if self.masks and self.masks.type != "local":
            return f"The masks come from {self.masks.type}: change them there."
        return self.fixed

    def caption_path(self, name: str) -> Path:
        """The caption file of a file, whether or not it exists."""
        beside = str(PurePosixPath(name).with_suffix(CAPTION_SUFFIX))
        return self.root / self.listing.captions.get(pair_key(name), beside)

    def find(self, words: str, only: str = "") -> tuple[Sequence[str], int]:
        """The files that have some words in their name or caption, and how many could not be looked at in time.

        Args:
            only: `excluded` or `uncaptioned` files, else all.
        """
        names, found = self.listing.files, list[str]()
        if only == "excluded":
            names = tuple(name for name in names if name in self.excluded)
        if not words and only != "uncaptioned":
            return names, 0
        end = time.monotonic() + PATIENCE
        for looked, name in enumerate(names):
            if time.monotonic() > end:
                return found, len(names) - looked
            text = self._text(name)
            is_wanted = only != "uncaptioned" or not (text.strip() or name in self.excluded)
            if is_wanted and words.casefold() in f"{name}\n{text}".casefold():
                found.append(name)
        return found, 0

    def _text(self, name: str) -> str:
        if self.locked or pair_key(name) not in self.listing.captions:
            return ""
        try:
            return read_caption(self.caption_path(name)) or ""
        except LeftOutError:
            return "?"  # there is something that cannot be read

    def show(self, names: Sequence[str]) -> Iterator[Shown]:
        """Some files, with what training makes of them."""
        known, shared = inspected(self.root, names), Counter(map(pair_key, names))
        planned = self._bare(names) if self.fixed and not self.is_packaged else self._planned(names)
        for entry, captions, mask in planned:
            card = card_of(known[entry.name], entry, [Words(caption) for caption in captions])
            text, locked, facts = None, self.locked, known[entry.name]
            try:
                text = None if locked else read_caption(self.caption_path(entry.name))
            except LeftOutError as error:
                locked = f"It {error}."
            yield Shown(
                card, stamp_of(facts), text, tag_of(text), locked, is_clip=facts.clip is not None, mask=mask,
                is_excluded=entry.name in self.excluded, shares=shared[pair_key(entry.name)] > 1,
            )  # fmt: skip

    def _planned(self, names: Sequence[str]) -> Iterator[Planned]:
        """What training makes of some files, as if there were no others and none had been left out."""
        entries = [
            # Which files are held out or chosen depends on all of them.
            each.model_copy(update={"hold_out": 0, "max_num_samples": None})
            for each in self.entries
            if each.id == self.entry.id or each.is_conditioning or each.is_text_embeds
        ]
        built = build_datasets(entries, self.context, Problems(), self._folders(names))
        dataset = next((each for each in built if each.id == self.entry.id), None)
        if dataset is None:
            return self._bare(names)
        captions = {sample.name: sample.captions for sample in dataset.samples}
        known = (entry for entry in placed(dataset) if entry.name in dataset.facts)
        return ((each, captions.get(each.name, ()), Mask.of(dataset, each.name)) for each in known)

    def _folders(self, names: Sequence[str]) -> dict[str, Folder]:
        """The folders of the dataset and of its partners, as if they had only some files."""
        folders, keys = {self.entry.id: part_of(self.entry, names, self.listing)}, set(map(pair_key, names))
        for each in (self.context.fill(each) for each in self.entries if each.is_conditioning):
            listing = list_files(each, self.context)
            folders[each.id] = part_of(each, [name for name in listing.files if pair_key(name) in keys], listing)
        return folders

    def _bare(self, names: Sequence[str]) -> Iterator[Planned]:
        """Some files without what training makes of them."""
        return ((LedgerEntry(self.entry.id, name), (), None) for name in names)


def list_files(entry: DatasetConfig, context: DataContext) -> Scan:
    """The files of an entry, listed again whenever that takes a small part of the time."""
    place = Path(entry.instance_data_dir or ""), discovery.wanted_suffixes(entry, context)
    until, listing = _listings.get(place, (0.0, Scan()))
    if (start := time.monotonic()) >= until:
        listing = discovery.scan(*place) if discovery.is_readable(place[0]) else Scan()
        _listings[place] = time.monotonic() + AGE * (time.monotonic() - start), listing
        while len(_listings) > MOST_LISTINGS:
            _listings.pop(next(iter(_listings)), None)
    return listing


def forget_listings() -> None:
    """After files were added."""
    _listings.clear()


def inspected(root: Path, names: Sequence[str]) -> dict[str, FileFacts]:
    """Facts of some files, each read once unless it changes."""
    facts = discovery.inspect_files(root, names, _facts[root])
    _facts[root] |= facts
    return facts


def stamp_of(facts: FileFacts) -> str:
    """Changes with the content of a file."""
    return f"{facts.size}-{facts.mtime_ns}"


def part_of(entry: DatasetConfig, names: Sequence[str], listing: Scan) -> Folder:
    """The folder of an entry as if it had only these files."""
    root = Path(entry.instance_data_dir or "")
    facts = inspected(root, sorted(names))
    captions = {key: listing.captions[key] for key in map(pair_key, names) if key in listing.captions}
    damaged = tuple(Rejected(entry.id, name, "damaged", fact.problem) for name, fact in facts.items() if fact.problem)
    return Folder(root, facts, Scan((*facts,), captions), frozenset(), damaged, {})
