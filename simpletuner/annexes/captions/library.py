"""The files of one dataset as they are trained, for the page, and edits of their captions. Free of torch.

Files are inspected a few at a time: a folder of a million files is listed, but not read. No file of the user is deleted
or moved. A caption is replaced only if it still says what the editor saw. Before many are replaced at once, their old
texts are saved in a hidden file beside them; the newest of these backups stay.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePosixPath

from simpletuner.annexes.captions.dataset_page import FileCard, Words, card_of, placed
from simpletuner.annexes.captions.wording import Wording
from simpletuner.atomic import free_path, write_atomically, write_json
from simpletuner.config.datasets import MASKS, DatasetConfig
from simpletuner.config.values import read_json
from simpletuner.data import discovery
from simpletuner.data.build import build_datasets
from simpletuner.data.captions import control_token, read_caption_text
from simpletuner.data.dataset import Dataset
from simpletuner.data.discovery import CAPTION_SUFFIX, FileFacts, Folder, Scan, pair_key, read_excluded
from simpletuner.data.entries import FIXED_PROMPTS, DataContext, link_partners
from simpletuner.data.files import LARGEST_CAPTION, LeftOutError
from simpletuner.data.sample import LedgerEntry, Rejected
from simpletuner.errors import Problems, Reading, UserError, required, result_of, visible

PATIENCE = 4.0  # seconds that a search may spend on reading captions
AGE = 10  # a listing is used for this many times as long as it took
MOST_LISTINGS = 3
Place = tuple[Path, frozenset[str]]  # a folder, and the extensions of its files
_listings: dict[Place, tuple[float, Scan]] = {}  # until when each is used
_facts: dict[Path, dict[str, FileFacts]] = defaultdict(dict)


@dataclass(frozen=True)
class Mask:
    """The part of a file that is learned.

    Attributes:
        stamp: changes with the content of the mask.
        share: of the trained crop; None if the mask is not used.
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
        text, tag: of its caption file; the text is None without one.
        locked: why its caption cannot be edited; empty if it can.
        is_excluded: it was excluded by hand, and can be included again.
        shares: another file has the same caption file.
        mask: the part that is learned; None for all of it.
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


Planned = tuple[LedgerEntry, Sequence[str], Mask | None]  # a file as it is trained, with its captions and mask


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
        """The files that were excluded by hand."""
        return result_of(discovery.read_excluded(self.entry))

    @property
    def fixed(self) -> str:
        """Why it is read-only; empty if it is not."""
        if self.is_packaged:
            return "This belongs to a packaged example: copy it to change it."
        if self.entry.type != "local":
            return f"Files and captions come from {self.entry.type}: change them there."
        if self.entry.is_conditioning:
            return "These are partners or masks: their captions are those of the files that they belong to."
        return ""

    @property
    def locked(self) -> str:
        """Why its captions are read-only; empty if they are not."""
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
        """Why masks for its files cannot be painted; empty if they can."""
        if self.masks and self.masks.type != "local":
            return f"The masks come from {self.masks.type}: change them there."
        return self.fixed

    def caption_path(self, name: str) -> Path:
        """The caption file of a file, whether or not it exists."""
        beside = str(PurePosixPath(name).with_suffix(CAPTION_SUFFIX))
        return self.root / self.listing.captions.get(pair_key(name), beside)

    def find(self, words: str, only: str = "") -> tuple[Sequence[str], int]:
        """The files with these words in their name or caption, and how many were not searched in time.

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
        """These files as training uses them."""
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
        """These files as training would use them if the dataset had no others and none were excluded."""
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
        """The folders of the dataset and of its partners, reduced to these files."""
        folders, keys = {self.entry.id: part_of(self.entry, names, self.listing)}, set(map(pair_key, names))
        for each in (self.context.fill(each) for each in self.entries if each.is_conditioning):
            listing = list_files(each, self.context)
            folders[each.id] = part_of(each, [name for name in listing.files if pair_key(name) in keys], listing)
        return folders

    def _bare(self, names: Sequence[str]) -> Iterator[Planned]:
        """These files without their use in training."""
        return ((LedgerEntry(self.entry.id, name), (), None) for name in names)


def list_files(entry: DatasetConfig, context: DataContext) -> Scan:
    """The files of an entry; a listing is kept for `AGE` times as long as it took."""
    place = Path(entry.instance_data_dir or ""), discovery.wanted_suffixes(entry, context)
    until, listing = _listings.get(place, (0.0, Scan()))
    if (start := time.monotonic()) >= until:
        listing = discovery.scan(*place) if discovery.is_readable(place[0]) else Scan()
        _listings[place] = time.monotonic() + AGE * (time.monotonic() - start), listing
        while len(_listings) > MOST_LISTINGS:
            _listings.pop(next(iter(_listings)), None)
    return listing


def forget_listings() -> None:
    """List folders again, after files were added."""
    _listings.clear()


def inspected(root: Path, names: Sequence[str]) -> dict[str, FileFacts]:
    """Facts of files; a file is read again only if it has changed."""
    facts = discovery.inspect_files(root, names, _facts[root])
    _facts[root] |= facts
    return facts


def stamp_of(facts: FileFacts) -> str:
    """Changes with the content of a file."""
    return f"{facts.size}-{facts.mtime_ns}"


def part_of(entry: DatasetConfig, names: Sequence[str], listing: Scan) -> Folder:
    """The folder of an entry, reduced to these files."""
    root = Path(entry.instance_data_dir or "")
    facts = inspected(root, sorted(names))
    captions = {key: listing.captions[key] for key in map(pair_key, names) if key in listing.captions}
    damaged = tuple(Rejected(entry.id, name, fact.reason, fact.problem) for name, fact in facts.items() if fact.problem)
    return Folder(root, facts, Scan((*facts,), captions), rejected=damaged)


BACKUP = re.compile(r"\.captions-[\d-]+\.json")
MOST_BACKUPS = 3  # of a folder: each is listed among the files that are not used
UNWRITABLE = re.compile("[\0\ud800-\udfff]")  # readers refuse NUL; UTF-8 cannot encode surrogates
# Held from the check that a file is unchanged until it is replaced.
_writing = threading.Lock()

Edit = Callable[[str, str], str]  # name and text of a caption file in, new text out


class ChangedMeanwhileError(UserError):
    """A file has changed since it was opened."""


@dataclass(frozen=True)
class CaptionChange:
    """The change of a caption file; `name` is its path below the dataset's folder."""

    name: str
    path: Path
    before: str
    after: str


def read_caption(path: Path) -> str | None:
    """The text of a caption file; None if there is none.

    Raises:
        LeftOutError: it cannot be read.
    """
    return read_caption_text(path) if path.is_file() else None


def tag_of(text: str | None) -> str:
    """Identifies the text of a caption file; empty if there is none."""
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()[:32]


def write_caption(path: Path, text: str, seen: str) -> None:
    """Replace the text of a caption file.

    Args:
        seen: the tag of its text when it was opened.

    Raises:
        ChangedMeanwhileError: it has changed since.
        UserError: the text cannot be a caption.
    """
    content = content_of(text)
    with _writing:
        _check_unchanged(path, seen)
        write_atomically(path, content)


def _check_unchanged(path: Path, seen: str) -> None:
    try:
        tag = tag_of(read_caption(path))
    except LeftOutError:
        tag = "not text any more"
    if tag != seen:
        raise ChangedMeanwhileError(f"{path.name} has changed since it was opened. It is kept as it is.")


def content_of(text: str) -> str:
    """A text as it is written to a caption file: without spaces at the ends of lines, and ending in a newline.

    Raises:
        UserError: it cannot be a caption.
    """
    content = "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).strip("\n")
    if token := control_token(content):
        raise UserError(f"A caption cannot have {token}, a control token of the tokenizer.")
    if odd := UNWRITABLE.search(content):
        raise UserError(f"A caption cannot have the character {odd.group()!a}.")
    if len(content.encode()) >= LARGEST_CAPTION:
        raise UserError(f"A caption cannot have more than {LARGEST_CAPTION:,} bytes.")
    return f"{content}\n" if content else ""


def _tidied(edit: Edit) -> Edit:
    """An edit whose changed results are tidied by `content_of`."""
    return lambda name, text: text if (after := edit(name, text)) == text else content_of(after)


def replacing(find: str, new: str) -> Edit:
    """Replace every occurrence of a text."""
    return _tidied(lambda name, text: text.replace(find, new))


def prefixing(trigger: str, *, whole: bool) -> Edit:
    """Put a trigger before captions that do not begin with it.

    Args:
        whole: a file is one caption; otherwise every line is.

    Raises:
        ConfigError: the trigger is not a word or a few words on one line.
    """
    wording = Wording("short", trigger)
    Problems(wording.problems()).raise_if_fatal()
    begins = re.compile(rf"\s*(?:$|{re.escape(trigger.strip())}(?!\w))")

    def edit(name: str, text: str) -> str:
        lines = [text] if whole else text.split("\n")
        return "\n".join(line if begins.match(line) else f"{wording.lead}{line}" for line in lines)

    return _tidied(edit)


def restoring(backup: Path) -> Reading[Edit]:
    """Undo a batch of changes from its backup; texts that training would refuse are restored, too."""
    texts: Mapping[str, str] = (yield from read_json(backup, dict, "the captions of a dataset")) or {}
    return lambda name, text: texts.get(name, text)


def changes_of(files: Mapping[str, Path], edit: Edit) -> tuple[list[CaptionChange], list[str]]:
    """The changes that an edit makes, and the names of unreadable files.

    Args:
        files: caption files by name.

    Raises:
        UserError: a result cannot be a caption.
    """
    changes, unreadable = [], []
    for name, path in files.items():
        try:
            text = read_caption(path) or ""
        except LeftOutError:
            unreadable.append(name)
            continue
        if (after := edit(name, text)) != text:
            changes.append(CaptionChange(name, path, text, after))
    return changes, unreadable


def digest_of(changes: Sequence[CaptionChange]) -> str:
    """Identifies changes, so that only those are applied that were shown."""
    return tag_of("".join(map(tag_of, (part for each in changes for part in (each.name, each.before, each.after)))))


def apply(changes: Iterable[CaptionChange], folder: Path) -> str:
    """Write changes; returns the name of the backup of the old texts in the dataset's folder.

    Raises:
        ChangedMeanwhileError: a file has changed; those before it are written.
    """
    changes = list(changes)
    with _writing:
        backup = free_path(folder / f".captions-{datetime.now().astimezone():%Y%m%d-%H%M%S}.json")
        write_json(backup, {change.name: change.before for change in changes})
        for change in changes:
            _check_unchanged(change.path, tag_of(change.before))
            write_atomically(change.path, change.after)
        backups = [each for each in folder.glob(".captions-*") if BACKUP.fullmatch(each.name)]
        for old in sorted(backups, key=lambda path: path.stat().st_mtime_ns)[:-MOST_BACKUPS]:
            old.unlink(missing_ok=True)
    return backup.name


def exclude(config: DatasetConfig, names: AbstractSet[str], path: Path, *, out: bool) -> None:
    """Exclude files from training, or include them again.

    Args:
        path: of the entry's `exclude_files`.

    Raises:
        ConfigError: the list cannot be read; it stays as it is.
    """
    with _writing:
        excluded = required(read_excluded(config))
        write_json(path, sorted(excluded | names if out else excluded - names))
