"""The files of a dataset for the page, and how they are trained.

Files are inspected a few at a time: a folder of a million files is listed, but not read.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from simpletuner.annexes.captions.dataset_page import FileCard, Words, card_of, ledger_with_crops
from simpletuner.annexes.captions.editing import read_caption, tag_of
from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.data import discovery
from simpletuner.data.build import build_datasets
from simpletuner.data.dataset import Dataset
from simpletuner.data.discovery import Folder, Scan
from simpletuner.data.entries import FIXED_PROMPTS, DataContext, link_partners
from simpletuner.data.file_index import FileFacts, inspect_files
from simpletuner.data.file_names import CAPTION_SUFFIXES, index_partners, pair_key, partners_of
from simpletuner.data.files import LeftOutError
from simpletuner.data.sample import LedgerEntry, Rejected
from simpletuner.errors import Problems, escape_controls

PATIENCE = 4.0  # seconds that a search may spend reading captions
UNREADABLE = "?"  # not empty, so that an unreadable caption does not count as missing
LINKED = "is behind a link out of the project; to allow its folder, start the server with --root"
_facts: dict[Path, dict[str, FileFacts]] = defaultdict(dict)


@dataclass(frozen=True)
class Mask:
    """A file's mask, which marks the learned part.

    Attributes:
        stamp: changes with the content of the mask.
        share: learned share of the trained crop; None if the mask is not used.
    """

    path: Path
    stamp: str
    share: float | None

    @classmethod
    def of(cls, dataset: Dataset, name: str) -> Mask | None:
        """The mask of a dataset's file; None if it has none."""
        masks = dataset.masks
        mask = None if masks is None else masks.name_for(name)
        if masks is None or mask is None:
            return None
        stamp = stamp_of(masks.facts[mask])
        return cls(masks.root / mask, stamp, dataset.white_shares.get(mask))


@dataclass(frozen=True)
class ShownFile:
    """A file of a dataset, as the page shows it.

    Attributes:
        card: sizes, crop, captions as they are trained, and why the file is not used.
        stamp: changes with the content of the file.
        text, tag: content of the caption file and its tag; the text is None without a caption file
            that may be shown.
        locked: why the caption cannot be edited; empty if it can.
        is_excluded: the user excluded the file, and can include it again.
        shares: another file has the same caption file.
        mask: None if the whole file is learned.
        hidden: why the picture or clip must not be shown; empty if it may.
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
    hidden: str

    @property
    def name(self) -> str:
        """The file name, with control characters escaped."""
        return escape_controls(self.card.name)


# How a file is trained, with its captions and its mask.
Planned = tuple[LedgerEntry, Sequence[str], Mask | None]


@dataclass(frozen=True)
class Library:
    """The files of a dataset.

    Attributes:
        entry: the dataset's entry, with defaults filled in.
        entries: all entries of the dataset file, as written.
        context: the run's context.
        is_packaged: the dataset belongs to a packaged example.
        may_show: whether the page may show the content of a file.
    """

    entry: DatasetConfig
    entries: Sequence[DatasetConfig]
    context: DataContext
    is_packaged: bool = False
    may_show: Callable[[Path], bool] = lambda path: True

    @property
    def root(self) -> Path:
        """The dataset's folder."""
        return Path(self.entry.instance_data_dir or "")

    @cached_property
    def listing(self) -> Scan:
        """The names of the files and caption files."""
        return list_files(self.entry, self.context)

    @cached_property
    def files_by_pair_key(self) -> Counter[str]:
        """The number of files of each pair key."""
        return Counter(map(pair_key, self.listing.files))

    @cached_property
    def masks(self) -> DatasetConfig | None:
        """The entry of the masks of this dataset; None if it has none."""
        entries = [self.context.fill(entry) for entry in self.entries]
        links = link_partners(entries, self.context, Problems())
        for partner in links.get(self.entry.id, []):
            if partner.conditioning_type in MASKS:
                return partner
        return None

    @cached_property
    def excluded(self) -> frozenset[str]:
        """The files that the user has excluded."""
        return discovery.read_excluded(self.entry, Problems())

    @property
    def fixed(self) -> str:
        """Why the dataset is read-only; empty if it is not."""
        if self.is_packaged:
            return "This dataset belongs to a packaged example: copy the example to change it."
        if self.entry.type != "local":
            return f"Files and captions come from {self.entry.type}: change them there."
        if self.entry.is_conditioning:
            return (
                "These are partners or masks: they use the captions of the files that they "
                "belong to."
            )
        return ""

    @property
    def locked(self) -> str:
        """Why the captions are read-only; empty if they are not."""
        strategy = self.entry.caption_strategy
        if self.fixed:
            return self.fixed
        advice = "To caption each file, set Caption Strategy to textfile."
        if self.entry.only_instance_prompt or strategy in FIXED_PROMPTS:
            return f"Every file is trained with Instance Prompt. {advice}"
        if strategy == "filename":
            return f"Each file is captioned by its name. {advice}"
        if strategy != "textfile":
            return f"Captions come from a table: change them there. {advice}"
        return ""

    @property
    def unpaintable(self) -> str:
        """Why masks cannot be painted; empty if they can."""
        if self.masks and self.masks.type != "local":
            return f"The masks come from {self.masks.type}: change them there."
        return self.fixed

    def caption_path(self, name: str) -> Path:
        """The path of a file's caption file, whether or not it exists."""
        default = str(PurePosixPath(name).with_suffix(CAPTION_SUFFIXES[0]))
        return self.root / self.listing.captions.get(name, default)

    def hidden_caption(self, name: str) -> str:
        """Why the captions of a file must not be shown; empty if they may."""
        sources: Sequence[str] = ()
        if self.entry.caption_strategy == "metadata":
            sources = self.listing.metadata
        elif self.entry.caption_strategy == "textfile" and name in self.listing.captions:
            sources = (self.listing.captions[name],)
        return self._why_hidden(sources)

    def _why_hidden(self, names: Sequence[str]) -> str:
        """Why a file among these must not be shown; empty if all may."""
        for name in names:
            if not self.may_show(self.root / name):
                return f"{escape_controls(name)} {LINKED}."
        return ""

    def find(self, words: str, only: str = "") -> tuple[Sequence[str], int]:
        """Search file names and captions.

        Args:
            words: text to search for; case is ignored.
            only: `excluded` or `uncaptioned` restricts the search to these files.

        Returns:
            The matching files, and how many files were not searched in time.
        """
        names = self.listing.files
        matches: list[str] = []
        if only == "excluded":
            names = tuple(name for name in names if name in self.excluded)
        if not words and only != "uncaptioned":
            return names, 0
        end = time.monotonic() + PATIENCE
        for searched, name in enumerate(names):
            if time.monotonic() > end:
                return matches, len(names) - searched
            text = self.text_of(name)
            needs_no_caption = bool(text.strip()) or name in self.excluded
            if only == "uncaptioned" and needs_no_caption:
                continue
            if words.casefold() in f"{name}\n{text}".casefold():
                matches.append(name)
        return matches, 0

    def text_of(self, name: str) -> str:
        """The text of a file's caption file, for searching and sorting."""
        if self.locked or name not in self.listing.captions:
            return ""
        if self.hidden_caption(name):
            return UNREADABLE
        try:
            return read_caption(self.caption_path(name)) or ""
        except LeftOutError:
            return UNREADABLE

    def show(self, names: Sequence[str]) -> Iterator[ShownFile]:
        """Show files as training uses them, in the order of their names in `names`."""
        facts = inspected(self.root, names)
        uses = Counter(map(self.caption_path, names))  # of caption files
        if self.fixed and not self.is_packaged:
            planned = self._unplanned(names)
        else:
            planned = self._planned(names)
        # Datasets sort their files by name.
        position = {name: index for index, name in enumerate(names)}
        for entry, captions, mask in sorted(planned, key=lambda row: position[row[0].name]):
            hidden = self.hidden_caption(entry.name)
            words = [] if hidden else [Words(caption) for caption in captions]
            text = None
            locked = hidden or self.locked
            if not locked:
                try:
                    text = read_caption(self.caption_path(entry.name))
                except LeftOutError as error:
                    locked = f"This file {error}."
            file = facts[entry.name]
            yield ShownFile(
                card=card_of(file, entry, words),
                stamp=stamp_of(file),
                text=text,
                tag=tag_of(text),
                locked=locked,
                is_clip=file.clip is not None,
                is_excluded=entry.name in self.excluded,
                shares=uses[self.caption_path(entry.name)] > 1,
                mask=mask,
                hidden=self._why_hidden([entry.name]),
            )

    def _planned(self, names: Sequence[str]) -> Iterator[Planned]:
        """How training would use these files if they were the whole dataset, none excluded."""
        entries = []
        for entry in self.entries:
            if entry.id == self.entry.id or entry.is_conditioning or entry.is_text_embeds:
                # Both settings depend on all files of the dataset.
                entries.append(entry.model_copy(update={"hold_out": 0, "max_num_samples": None}))
        datasets = build_datasets(entries, self.context, Problems(), self._folders(names))
        for dataset in datasets:
            if dataset.id == self.entry.id:
                return self._as_trained(dataset)
        return self._unplanned(names)

    def _as_trained(self, dataset: Dataset) -> Iterator[Planned]:
        """The files of a dataset with their captions and masks."""
        captions = {sample.name: sample.captions for sample in dataset.samples}
        for entry in ledger_with_crops(dataset):
            if entry.name in dataset.facts:
                yield entry, captions.get(entry.name, ()), Mask.of(dataset, entry.name)

    def _unplanned(self, names: Sequence[str]) -> Iterator[Planned]:
        """The files without information on their use in training."""
        for name in names:
            yield LedgerEntry(self.entry.id, name), (), None

    def _folders(self, names: Sequence[str]) -> dict[str, Folder]:
        """The folders of the dataset and of its partners, reduced to these files."""
        folders = {self.entry.id: part_of(self.entry, names, self.listing)}
        for entry in self.entries:
            if not entry.is_conditioning:
                continue
            partner = self.context.fill(entry)
            listing = list_files(partner, self.context)
            index = index_partners(listing.files)
            kept: dict[str, None] = {}  # ordered, without duplicates
            for name in names:
                kept |= dict.fromkeys(partners_of(name, index))
            folders[partner.id] = part_of(partner, [*kept], listing)
        return folders


def list_files(entry: DatasetConfig, context: DataContext) -> Scan:
    """List the files of an entry."""
    folder = Path(entry.instance_data_dir or "")
    if not discovery.is_readable(folder):
        return Scan()
    return discovery.scan(folder, discovery.accepted_suffixes(entry, context))


def inspected(root: Path, names: Sequence[str]) -> dict[str, FileFacts]:
    """Facts about files; a file is read again only if it has changed."""
    facts = inspect_files(root, names, _facts[root])
    _facts[root] |= facts
    return facts


def stamp_of(facts: FileFacts) -> str:
    """Size and modification time of a file, which change with its content."""
    return f"{facts.size}-{facts.mtime_ns}"


def part_of(entry: DatasetConfig, names: Sequence[str], listing: Scan) -> Folder:
    """The folder of an entry, reduced to these files."""
    root = Path(entry.instance_data_dir or "")
    facts = inspected(root, sorted(names))
    captions = {name: listing.captions[name] for name in names if name in listing.captions}
    damaged = tuple(
        Rejected(entry.id, name, fact.reason, fact.problem)
        for name, fact in facts.items()
        if fact.problem
    )
    return Folder(root, facts, Scan((*facts,), captions, listing.metadata), rejected=damaged)
