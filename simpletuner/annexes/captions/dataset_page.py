"""`simpletuner dataset`: a page that shows how all dataset files will be trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer

from simpletuner.annexes.report.html import render, thumbnail
from simpletuner.atomic import write_atomically
from simpletuner.data.buckets import Geometry
from simpletuner.data.dataset import Dataset, DatasetFile
from simpletuner.data.file_index import FileFacts
from simpletuner.data.files import MediaError
from simpletuner.data.media_checks import NOTICEABLE_ENLARGEMENT
from simpletuner.data.pictures import fit
from simpletuner.data.sample import UNCAPTIONED, LedgerEntry
from simpletuner.distributed.world import usable_cores
from simpletuner.planning.plans import Survey
from simpletuner.reporting.events import EventStream

TOKENIZER = "tokenizer.json"
FRAMES = 8  # decoded per clip, to measure motion
# file count above which thumbnails are small; thumbnail sides in pixels
MANY = 500
SMALL = 160
LARGE = 320
BLURRED = 0.25  # of the median sharpness of a dataset
STILL = 0.004  # mean change between frames; smaller changes are camera noise
SIDE = 8  # of the compared grid; two directions give 128 bits
BITS = 2 * SIDE**2
# Maximum differences between near-duplicates (resized, re-encoded or slightly retouched): in bits,
# and in the mean colour of any grid cell. Bits alone do not distinguish two shapes on a uniform
# background.
NEAR = 8
LIKE = 40
NOISE = 2  # of 255; below it, bits of uniform areas would be random
ROWS = 1024  # compared with all files at a time, to bound memory
# Remarks about files, in the order of the page's buttons.
KINDS = {
    "unused": "not used",
    "twin": "near-duplicates",
    "blurred": "blurred",
    "small": "small",
    "still": "hardly moving",
    "cut": "caption cut off",
}


@dataclass(frozen=True)
class Words:
    """A caption as it is encoded: the kept part, the truncated part, and its number of tokens, if
    known.
    """

    kept: str
    cut: str = ""
    tokens: int | None = None


@dataclass
class FileCard:
    """One file on the page.

    Attributes:
        kinds: remarks, by keys of `KINDS`.
        source: the picture, or the first frame of a clip, as a data URI; empty if it cannot be
            shown.
        ratio: width / height.
        size, trained: size of the file, and size at which it is trained.
        box: left, top, width and height of the trained crop, in percent of the picture.
        sharpness, motion: see the functions below; None if not measured.
        print: the `colour_grid` of the picture.
    """

    name: str
    kinds: dict[str, str]
    words: Sequence[Words] = ()
    source: str = ""
    ratio: float = 1.0
    size: str = ""
    trained: str = ""
    box: Sequence[float] | None = None
    sharpness: float | None = None
    motion: float | None = None
    print: NDArray[np.int16] | None = None


CaptionReader = Callable[[Dataset, str], Words]


def write_page(survey: Survey, path: Path, events: EventStream) -> None:
    """Inspect all files and write the page, and nothing else.

    Raises:
        WriteError: the page cannot be written.
    """
    cards = look_at_all(survey, events)
    for shown in cards.values():
        mark_blurred(shown)
    # Near-duplicates are searched across datasets, except partners and masks.
    mark_twins(
        [
            card
            for data in survey.datasets
            if not data.config.is_conditioning
            for card in cards[data.id]
        ]
    )
    page = render(
        "captions/dataset.html.jinja",
        survey=survey,
        cards=cards,
        found=Counter(kind for shown in cards.values() for card in shown for kind in card.kinds),
        kinds=KINDS,
        room=survey.spec.captions.room(survey.config.text),
        counted=tokenizer_file(survey) is not None,
        scripts=("captions/dataset.js",),
        refresh=None,
    )
    write_atomically(path, page, durable=False)


def look_at_all(survey: Survey, events: EventStream) -> dict[str, list[FileCard]]:
    """The cards of all files by dataset, decoded in threads."""
    read = caption_reader(survey)
    cards = {dataset.id: list[FileCard]() for dataset in survey.datasets}
    files = [(dataset, entry) for dataset in survey.datasets for entry in placed(dataset)]
    captions = {
        (dataset.id, sample.name): sample.captions
        for dataset in survey.datasets
        for sample in dataset.samples
    }
    side = SMALL if len(files) > MANY else LARGE

    def look(file: tuple[Dataset, LedgerEntry]) -> FileCard:
        words = [read(file[0], caption) for caption in captions.get((file[0].id, file[1].name), ())]
        return look_at(*file, words, side)

    pool = ThreadPoolExecutor(min(survey.config.caching.max_workers, usable_cores()))
    with events.phase("Looking at the files", len(files), "files") as phase:
        try:
            for (dataset, entry), card in zip(files, pool.map(look, files), strict=True):
                cards[dataset.id].append(card)
                phase.advance(1, entry.name)
        finally:
            pool.shutdown(cancel_futures=True)
    return cards


def placed(dataset: Dataset) -> Iterator[LedgerEntry]:
    """The ledger, with crops also for files that are rejected only because they have no usable
    caption.
    """
    silent = {file.name for file in dataset.rejected if file.reason in UNCAPTIONED}
    for entry in dataset.ledger():
        if entry.name in silent:
            geometry, _ = dataset.place(entry.name, dataset.facts[entry.name].picture_size, epoch=1)
            entry = replace(entry, geometry=geometry)
        yield entry


def tokenizer_file(survey: Survey) -> Path | None:
    """The tokenizer of the checkpoint, if it is on this machine."""
    folder = survey.source["tokenizer"].local_folder()
    return folder / TOKENIZER if folder is not None and (folder / TOKENIZER).is_file() else None


def caption_reader(survey: Survey) -> CaptionReader:
    """A function that splits captions where prompts are truncated, if the checkpoint's tokenizer is
    on this machine.
    """
    spec = survey.spec
    file = tokenizer_file(survey)
    if file is None:
        return lambda dataset, caption: Words(caption)
    tokenizer = Tokenizer.from_file(str(file))
    room = spec.captions.room(survey.config.text)

    def read(dataset: Dataset, caption: str) -> Words:
        text = spec.captions.clean(spec.captions.apply_dataset_keys(dataset.config, caption))
        spans = tokenizer.encode(text, add_special_tokens=False).offsets
        end = spans[room][0] if len(spans) > room else len(text)
        return Words(text[:end], text[end:], len(spans))

    return read


def look_at(dataset: Dataset, entry: LedgerEntry, words: Sequence[Words], side: int) -> FileCard:
    """Decode and measure a file."""
    facts = dataset.facts.get(entry.name)
    card = card_of(facts, entry, words)
    if facts is None or facts.problem is not None:
        return card
    try:
        frames = DatasetFile(dataset, entry.name).frames(FRAMES)
    except MediaError as error:
        return FileCard(entry.name, {"unused": str(error)}, words)
    card.source = thumbnail(frames[0], side)
    card.print = colour_grid(frames[0])
    if entry.geometry is not None:
        card.sharpness = sharpness(frames[0], entry.geometry)
    if any(part.cut for part in words):
        card.kinds["cut"] = "caption cut off"
    if len(frames) > 1:
        card.motion = motion(frames)
        if card.motion < STILL:
            card.kinds["still"] = "hardly moves"
    return card


def card_of(facts: FileFacts | None, entry: LedgerEntry, words: Sequence[Words]) -> FileCard:
    """The card of a file, without the fields that need decoding."""
    card = FileCard(entry.name, {"unused": entry.use} if entry.use else {}, words)
    if facts is None or facts.problem is not None:
        return card
    card.size = f"{facts.width}x{facts.height}"
    card.ratio = facts.width / facts.height
    if (geometry := entry.geometry) is not None:
        card.trained = entry.trained_size
        sizes = (*geometry.crop, *geometry.size)
        card.box = [
            100 * part / whole for part, whole in zip(sizes, geometry.resized * 2, strict=True)
        ]
        if (enlarged := geometry.resized[0] / facts.width) > NOTICEABLE_ENLARGEMENT:
            card.kinds["small"] = f"enlarged {enlarged:.1f} times"
    return card


def mark_blurred(cards: Sequence[FileCard]) -> None:
    """Mark files much less sharp than the dataset's median; a relative limit does not mark a soft
    style.
    """
    known = [(card, card.sharpness) for card in cards if card.sharpness is not None]
    least = BLURRED * median(value for _, value in known) if known else 0
    for card, value in known:
        if value < least:
            card.kinds["blurred"] = "blurred"


def mark_twins(cards: Iterable[FileCard]) -> None:
    """Mark near-duplicates with the number of their group."""
    printed = [(card, card.print) for card in cards if card.print is not None]
    for number, group in enumerate(near_duplicates([grid for _, grid in printed]), 1):
        for member in group:
            printed[member][0].kinds["twin"] = f"near-duplicate {number}"


def colour_grid(picture: Image.Image) -> NDArray[np.int16]:
    """The mean colours of a grid of 9 x 9 cells, `9 9 3`."""
    # Signed, since grids are subtracted.
    return np.asarray(picture.resize((SIDE + 1, SIDE + 1), Image.Resampling.BOX), dtype=np.int16)


def difference_hash(prints: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Whether each of 8 x 8 cells is darker than its right neighbour, and than its lower neighbour
    (N 128).
    """
    grey = prints.mean(axis=3)
    cells = grey[:, :-1, :-1]
    right = grey[:, :-1, 1:]
    below = grey[:, 1:, :-1]
    return np.concatenate(
        [(side - cells > NOISE).reshape(-1, SIDE**2) for side in (right, below)], axis=1
    )


def near_duplicates(prints: Sequence[NDArray[np.int16]]) -> list[list[int]]:
    """Groups of near-duplicates, as indices of colour grids: the connected components of their
    similarity.
    """
    grids = np.array(prints, dtype=np.int16).reshape(-1, SIDE + 1, SIDE + 1, 3)
    signs = difference_hash(grids).astype(np.float32) * 2 - 1
    group = np.arange(len(grids))
    for start in range(0, len(grids), ROWS):
        agreement = (
            signs[start : start + ROWS] @ signs.T
        )  # equal bits - differing bits = BITS - 2 * differing bits
        for row, is_near in enumerate(agreement >= BITS - 2 * NEAR, start):
            near = np.flatnonzero(is_near)
            distance = np.abs(grids[near] - grids[row]).mean(axis=3).max(axis=(1, 2))
            joined = group[near[distance <= LIKE]]
            # Whole groups are merged, since near-duplicates form chains.
            group[np.isin(group, joined)] = joined.min()
    groups = [np.flatnonzero(group == label).tolist() for label in np.unique(group)]
    return [members for members in groups if len(members) > 1]


def sharpness(picture: Image.Image, geometry: Geometry) -> float:
    """Variance of the Laplacian of the trained crop (Pech-Pacheco et al., ICPR 2000); low if out of
    focus.
    """
    grey = fit(picture.convert("L"), geometry, Image.Resampling.BILINEAR).astype(np.float32)
    around = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:]
    return float((around - 4 * grey[1:-1, 1:-1]).var())


def motion(frames: Sequence[Image.Image]) -> float:
    """Mean change of brightness between successive frames, as a share of the full range."""
    small = [
        np.asarray(frame.convert("L").resize((64, 64), Image.Resampling.BOX), dtype=np.int16)
        for frame in frames
    ]
    return float(np.abs(np.diff(small, axis=0)).mean() / 255)
