"""`simpletuner dataset`: a page that shows how all dataset files will be trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
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
from simpletuner.data.sample import HELD_OUT, NOT_MEDIA, UNCAPTIONED, LedgerEntry
from simpletuner.distributed.world import usable_cores
from simpletuner.planning.plans import Survey
from simpletuner.reporting.events import EventStream

TOKENIZER = "tokenizer.json"
FRAMES = 8  # decoded per clip, to measure motion
# Sides of thumbnails in pixels; small ones for more than `MANY` files.
MANY = 500
SMALL_SIDE = 160
LARGE_SIDE = 320
# A file with less than this share of its dataset's median sharpness is blurred.
BLURRED = 0.25
# A clip with a smaller mean change between frames hardly moves; less is the noise of a camera.
STILL = 0.004
# Near-duplicates are compared by a grid of 8 x 8 cells, in two directions, so by 128 bits.
GRID_SIDE = 8
BITS = 2 * GRID_SIDE**2
# Brightness, of 255, by which cells must differ; the bits of uniform areas would be random.
NOISE = 2
# Maximum differences between near-duplicates (resized, re-encoded or slightly retouched): in bits,
# and in the mean colour of any grid cell. Bits alone do not distinguish two shapes on a uniform
# background.
MOST_BITS = 8
MOST_COLOUR = 40
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

# The kind of files that are neither pictures nor clips; no button shows them.
OTHER = "other"


@dataclass(frozen=True)
class Words:
    """A caption as it is encoded: the kept part, the truncated part, and the tokens, if known."""

    kept: str
    cut: str = ""
    tokens: int | None = None


@dataclass
class FileCard:
    """One file on the page.

    Attributes:
        kinds: remarks, by keys of `KINDS`, or by `OTHER`.
        source: the picture, or the first frame of a clip, as a data URI; empty if it cannot be
            shown.
        ratio: width / height.
        size, trained: size of the file, and size at which it is trained.
        box: left, top, width and height of the trained crop, in percent of the picture.
        sharpness, motion: see the functions below; None if not measured.
        relative_sharpness: as a share of the median of the dataset.
        fingerprint: the `colour_grid` of the picture, by which near-duplicates are found.
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
    relative_sharpness: float | None = None
    motion: float | None = None
    fingerprint: NDArray[np.int16] | None = None


CaptionReader = Callable[[Dataset, str], Words]


def write_page(survey: Survey, path: Path, events: EventStream) -> None:
    """Inspect all files and write the page, and nothing else.

    Raises:
        WriteError: the page cannot be written.
    """
    cards = make_cards(survey, events)
    for dataset in survey.datasets:
        mark_blurred(cards[dataset.id])
        mark_others(cards[dataset.id], dataset)
    # Near-duplicates are searched across datasets, except partners and masks.
    compared: list[FileCard] = []
    for dataset in survey.datasets:
        if not dataset.config.is_conditioning:
            compared += cards[dataset.id]
    mark_near_duplicates(compared)
    counts = Counter[str]()
    for card in chain.from_iterable(cards.values()):
        counts.update(card.kinds.keys())
    page = render(
        "captions/dataset.html.jinja",
        survey=survey,
        cards=cards,
        counts=counts,
        kinds=KINDS,
        max_tokens=survey.spec.captions.room(survey.config.text),
        has_tokenizer=tokenizer_file(survey) is not None,
        scripts=("captions/dataset.js",),
        refresh=None,
    )
    write_atomically(path, page, durable=False)


def make_cards(survey: Survey, events: EventStream) -> dict[str, list[FileCard]]:
    """The cards of all files by dataset, decoded in threads."""
    read = caption_reader(survey)
    cards: dict[str, list[FileCard]] = {}
    captions: dict[tuple[str, str], Sequence[str]] = {}
    files: list[tuple[Dataset, LedgerEntry]] = []
    for dataset in survey.datasets:
        cards[dataset.id] = []
        files += [(dataset, entry) for entry in shown_files(dataset)]
        for sample in dataset.samples:
            captions[dataset.id, sample.name] = sample.captions
    side = SMALL_SIDE if len(files) > MANY else LARGE_SIDE

    def make(file: tuple[Dataset, LedgerEntry]) -> FileCard:
        dataset, entry = file
        words = [read(dataset, caption) for caption in captions.get((dataset.id, entry.name), ())]
        return make_card(dataset, entry, words, side)

    pool = ThreadPoolExecutor(min(survey.config.caching.max_workers, usable_cores()))
    with events.phase("Looking at the files", len(files), "files") as phase:
        try:
            for (dataset, entry), card in zip(files, pool.map(make, files), strict=True):
                cards[dataset.id].append(card)
                phase.advance(1, entry.name)
        finally:
            pool.shutdown(cancel_futures=True)
    return cards


def shown_files(dataset: Dataset) -> Iterator[LedgerEntry]:
    """The files of a dataset; held-out ones are shown in the dataset that they form."""
    held_out = {file.name for file in dataset.rejected if file.reason == HELD_OUT}
    for entry in ledger_with_crops(dataset):
        if entry.name not in held_out:
            yield entry


def mark_others(cards: Sequence[FileCard], dataset: Dataset) -> None:
    """Mark files that are neither pictures nor clips, which do not count as unused."""
    others = {file.name for file in dataset.rejected if file.reason in NOT_MEDIA}
    for card in cards:
        if card.name in others and "unused" in card.kinds:
            card.kinds[OTHER] = card.kinds.pop("unused")


def ledger_with_crops(dataset: Dataset) -> Iterator[LedgerEntry]:
    """The ledger of a dataset, with crops also for files that lack nothing but a caption."""
    uncaptioned = {file.name for file in dataset.rejected if file.reason in UNCAPTIONED}
    for entry in dataset.ledger():
        if entry.name in uncaptioned:
            geometry, _ = dataset.place(entry.name, dataset.facts[entry.name].picture_size, epoch=1)
            entry = replace(entry, geometry=geometry)
        yield entry


def tokenizer_file(survey: Survey) -> Path | None:
    """The tokenizer of the checkpoint, if it is on this machine."""
    folder = survey.source["tokenizer"].local_folder()
    if folder is None or not (folder / TOKENIZER).is_file():
        return None
    return folder / TOKENIZER


def caption_reader(survey: Survey) -> CaptionReader:
    """A function that splits captions where prompts are truncated.

    Without the checkpoint's tokenizer on this machine, it leaves captions whole.
    """
    spec = survey.spec
    file = tokenizer_file(survey)
    if file is None:
        return lambda dataset, caption: Words(caption)
    tokenizer = Tokenizer.from_file(str(file))
    max_tokens = spec.captions.room(survey.config.text)

    def read(dataset: Dataset, caption: str) -> Words:
        text = spec.captions.clean(spec.captions.apply_dataset_keys(dataset.config, caption))
        spans = tokenizer.encode(text, add_special_tokens=False).offsets  # start and end by token
        end = len(text)
        if len(spans) > max_tokens:
            end, _ = spans[max_tokens]  # where the first truncated token starts
        return Words(text[:end], text[end:], len(spans))

    return read


def make_card(dataset: Dataset, entry: LedgerEntry, words: Sequence[Words], side: int) -> FileCard:
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
    card.fingerprint = colour_grid(frames[0])
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
    card = FileCard(entry.name, {}, words)
    if entry.use:
        card.kinds["unused"] = entry.use
    if facts is None or facts.problem is not None:
        return card
    card.size = f"{facts.width}x{facts.height}"
    card.ratio = facts.width / facts.height
    geometry = entry.geometry
    if geometry is None:
        return card
    card.trained = f"{geometry.size.width}x{geometry.size.height}"
    if entry.frames > 1:
        card.trained += f", {entry.frames} frames"
    width, height = geometry.resized
    left, top = geometry.crop
    crop_width, crop_height = geometry.size
    card.box = [
        100 * left / width,
        100 * top / height,
        100 * crop_width / width,
        100 * crop_height / height,
    ]
    enlargement = width / facts.width
    if enlargement > NOTICEABLE_ENLARGEMENT:
        card.kinds["small"] = f"enlarged {enlargement:.1f} times"
    return card


def mark_blurred(cards: Sequence[FileCard]) -> None:
    """Compare the sharpness of files with the dataset's median, and mark those far below it.

    An absolute limit would mark all files of a soft style.
    """
    measured = [(card, card.sharpness) for card in cards if card.sharpness is not None]
    if not measured:
        return
    usual = median(value for _, value in measured)
    for card, value in measured:
        if usual:
            card.relative_sharpness = value / usual
        if value < BLURRED * usual:
            card.kinds["blurred"] = "blurred"


def mark_near_duplicates(cards: Iterable[FileCard]) -> None:
    """Mark near-duplicates with the number of their group."""
    compared: list[FileCard] = []
    grids: list[NDArray[np.int16]] = []
    for card in cards:
        if card.fingerprint is not None:
            compared.append(card)
            grids.append(card.fingerprint)
    for number, group in enumerate(near_duplicates(grids), start=1):
        for index in group:
            compared[index].kinds["twin"] = f"near-duplicate {number}"


def colour_grid(picture: Image.Image) -> NDArray[np.int16]:
    """The mean colours of a grid of 9 x 9 cells, `9 9 3`."""
    side = GRID_SIDE + 1  # the last row and column are only compared with their neighbours
    # Signed, since grids are subtracted.
    return np.asarray(picture.resize((side, side), Image.Resampling.BOX), dtype=np.int16)


def difference_hash(grids: NDArray[np.int16]) -> NDArray[np.bool_]:
    """Whether cells are darker than their right neighbour, and than their lower one (N 128)."""
    grey = grids.mean(axis=3)
    cells = grey[:, :-1, :-1]
    right = grey[:, :-1, 1:]
    below = grey[:, 1:, :-1]
    darker_than_right = right - cells > NOISE
    darker_than_below = below - cells > NOISE
    bits = np.stack([darker_than_right, darker_than_below], axis=1)
    return bits.reshape(-1, BITS)


def near_duplicates(fingerprints: Sequence[NDArray[np.int16]]) -> list[list[int]]:
    """Groups of near-duplicates, as indices of colour grids.

    The groups are the connected components of similarity.
    """
    # Reshaped for the case of no grids, whose array would have one dimension.
    grids = np.array(fingerprints, dtype=np.int16)
    grids = grids.reshape(-1, GRID_SIDE + 1, GRID_SIDE + 1, 3)
    signs = difference_hash(grids).astype(np.float32) * 2 - 1
    group = np.arange(len(grids))  # the smallest index in the group of a grid
    for start in range(0, len(grids), ROWS):
        # Equal bits minus differing bits, so BITS - 2 * differing bits.
        agreement = signs[start : start + ROWS] @ signs.T
        for row, is_near in enumerate(agreement >= BITS - 2 * MOST_BITS, start):
            near = np.flatnonzero(is_near)
            distance = np.abs(grids[near] - grids[row]).mean(axis=3).max(axis=(1, 2))
            joined = group[near[distance <= MOST_COLOUR]]
            # Whole groups are merged, since near-duplicates form chains.
            group[np.isin(group, joined)] = joined.min()
    groups = [np.flatnonzero(group == label).tolist() for label in np.unique(group)]
    return [members for members in groups if len(members) > 1]


def sharpness(picture: Image.Image, geometry: Geometry) -> float:
    """Variance of the Laplacian of the trained crop; low if it is out of focus.

    Pech-Pacheco et al., "Diatom autofocusing in brightfield microscopy", ICPR 2000.
    """
    grey = fit(picture.convert("L"), geometry, Image.Resampling.BILINEAR).astype(np.float32)
    neighbours = grey[:-2, 1:-1] + grey[2:, 1:-1] + grey[1:-1, :-2] + grey[1:-1, 2:]
    return float((neighbours - 4 * grey[1:-1, 1:-1]).var())


def motion(frames: Sequence[Image.Image]) -> float:
    """Mean change of brightness between successive frames, as a share of the full range."""
    small = [
        np.asarray(frame.convert("L").resize((64, 64), Image.Resampling.BOX), dtype=np.int16)
        for frame in frames
    ]
    return float(np.abs(np.diff(small, axis=0)).mean() / 255)
