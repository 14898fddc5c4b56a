"""Captions that are not used as they are meant: other programs' files, and texts split by lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from simpletuner.config.datasets import DatasetConfig
from simpletuner.data.dataset import Dataset
from simpletuner.data.discovery import Scan
from simpletuner.data.entries import FIXED_PROMPTS
from simpletuner.data.file_names import composed, concept_of, pair_key, suffix_of
from simpletuner.data.sample import UNCAPTIONED
from simpletuner.errors import Problem, Problems, counted, shorten

# What captions come from, as text.
ORIGINS = {
    "filename": "the file names",
    "metadata": "metadata.jsonl or metadata.csv",
    "parquet": "the parquet table",
}
ORIGINS |= dict.fromkeys(FIXED_PROMPTS, "instance_prompt")
# Files that other programs write beside pictures, with a caption in plain text.
OTHER_TEXTS = frozenset({".tags", ".tag", ".cap", ".captions", ".wd14", ".text"})
# Tables that other programs write, with what to do about one; {0} is its name.
TABLES: Mapping[str, str] = {
    ".jsonl": (
        "{0} lists captions: rename it to metadata.jsonl and set caption_strategy to metadata."
    ),
    ".csv": (
        "{0} lists captions: rename it to metadata.csv, name its columns file_name and text, and "
        "set caption_strategy to metadata."
    ),
    ".json": (
        "{0} lists captions, which are not read: write them into a metadata.jsonl with file_name "
        "and text (docs/DATALOADER.md) and set caption_strategy to metadata."
    ),
    ".parquet": (
        "{0} may list captions: metadata_backend parquet reads such a table (docs/DATALOADER.md)."
    ),
}
MOST_OPENED = 20  # files of a kind, to look for captions
MOST_NAMED = 3
LOOKED_INTO = 1 << 16  # bytes of a file that may hold captions
CAPTION_KEY = re.compile(rb"""["'](?:captions?|prompt|text|tags)["']\s*:""")
CAPTION_COLUMN = re.compile(
    rb"(?:^|[,;\t\"])(?:captions?|prompt|text)(?:$|[,;\t\"\r])", re.MULTILINE
)


def report_unused_captions(entry: DatasetConfig, dataset: Dataset, report: Problems) -> None:
    """Report captions in the folder that the dataset does not use.

    An error if the dataset has no samples without them, else a warning.

    Args:
        entry: the dataset's entry with its defaults filled in.
    """
    if entry.only_instance_prompt:  # the user chose not to use captions
        return
    listing = dataset.folder.listing
    strategy = entry.caption_strategy or ""
    origin = ORIGINS.get(strategy, strategy)
    messages: list[str] = []
    if strategy != "textfile" and listing.captions:
        count = counted(len({*listing.captions.values()}), "caption file")
        messages.append(
            f"captions come from {origin}, not from {count} beside them. To use them, set "
            "caption_strategy to textfile."
        )
    lacks_captions = any(file.reason in UNCAPTIONED for file in dataset.rejected)
    if strategy in ("filename", *FIXED_PROMPTS) or lacks_captions:
        if strategy != "metadata" and listing.metadata:
            advice = f"To use {listing.metadata[0]}, set caption_strategy to metadata."
            messages.append(f"captions are in {shorten(listing.metadata, 3)}, too. {advice}")
        messages += foreign_captions(dataset.root, listing)
    is_fatal = lacks_captions and not dataset.samples
    for message in messages:
        problem = Problem(f"{entry.id}.caption_strategy", message, is_fatal, kind="captions")
        report.append(problem)


def warn_of_unread_repeats(entry: DatasetConfig, dataset: Dataset, report: Problems) -> None:
    """Warn that the repeats in the names of folders, such as `10_zkt woman`, are not read.

    Args:
        entry: the dataset's entry with its defaults filled in.
    """
    if entry.repeats is not None:
        return
    folders = {sample.name.rpartition("/")[0] for sample in dataset.samples}
    for folder in sorted(folders):
        title = (dataset.root / folder).resolve().name
        concept = concept_of(title)
        if concept is None:
            continue
        repeats, _ = concept  # as kohya counts: all passes, ours are the extra ones
        if repeats == 1:
            continue
        message = (
            f"the repeats and words of the folder {title!r} are not read from its name: set "
            f"repeats to {repeats - 1}"
        )
        advice = "for several such folders, make an entry for each. `simpletuner start` does that"
        report.warn(f"{entry.id}.repeats", f"{message}; {advice}.")
        return


def foreign_captions(root: Path, listing: Scan) -> list[str]:
    """Sentences about files that other programs write captions into, each with what to do."""
    kinds: dict[str, list[str]] = {}
    for name, (reason, _) in listing.ignored.items():
        suffix = suffix_of(name)
        if reason.startswith("not a ") and suffix in (*OTHER_TEXTS, *TABLES):
            kinds.setdefault(suffix, []).append(name)
    if not kinds:
        return []
    media: set[str] = set()
    for name in listing.files:
        media |= {composed(name), pair_key(name)}
    sentences: list[str] = []
    for suffix, names in kinds.items():
        beside = [name for name in names if pair_key(name) in media]
        alone = [name for name in names if pair_key(name) not in media]
        sentences += _about_texts(root, suffix, beside)
        if suffix in TABLES:
            sentences += _about_tables(root, suffix, alone)
    return sentences


def _about_tables(root: Path, suffix: str, names: Sequence[str]) -> Iterator[str]:
    """A sentence about each of the first tables of captions."""
    # A folder may hold thousands of files of this kind.
    tables = [name for name in names[:MOST_OPENED] if _has_captions(root / name)]
    for name in tables[:MOST_NAMED]:
        yield TABLES[suffix].format(name)


def _about_texts(root: Path, suffix: str, names: Sequence[str]) -> Iterator[str]:
    """A sentence about files beside pictures or clips."""
    if not names:
        return
    files = counted(len(names), f"{suffix} file")
    beside = f"{files} beside pictures or clips ({names[0]})"
    if suffix in OTHER_TEXTS:
        yield f"{beside} may hold captions: rename them to .txt."
    if suffix == ".json" and _has_captions(root / names[0]):
        hold = "holds" if len(names) == 1 else "hold"
        advice = "write each caption into a .txt file of the same name"
        yield f"{beside} {hold} captions, which are not read: {advice}."


def _has_captions(path: Path) -> bool:
    """Whether a file that is neither a picture nor a clip seems to hold captions."""
    if path.suffix.lower() == ".parquet":
        return True
    if not path.is_file():  # opening a pipe would block
        return False
    try:
        with path.open("rb") as file:
            head = file.read(LOOKED_INTO)
    except OSError:
        return False
    wanted = CAPTION_COLUMN if path.suffix.lower() == ".csv" else CAPTION_KEY
    return wanted.search(head) is not None


def warn_of_split_texts(dataset: Dataset, report: Problems) -> None:
    """Warn about caption files that seem to hold one text and become a caption per line."""
    config = dataset.config
    reads_lines = config.caption_strategy == "textfile" and not config.disable_multiline_split
    if not reads_lines or config.only_instance_prompt:
        return
    caption_files = dataset.folder.listing.captions
    read: set[str] = set()
    split: dict[str, tuple[str, ...]] = {}
    for sample in dataset.samples:
        file = caption_files.get(sample.name, sample.name)
        read.add(file)
        facts = dataset.facts[sample.name]
        if facts.is_one_text and len(facts.captions) > 1:
            split[file] = facts.captions
    if not split:
        return
    file, captions = next(iter(split.items()))
    numbers = sorted({len(lines) for lines in split.values()})
    parts = str(numbers[0])
    if len(numbers) > 1:
        parts = f"{numbers[0]} to {numbers[-1]}"
    files = f"{len(split)} of {counted(len(read), 'caption file')}"
    example = f"{min(captions, key=len)!r} of {file}"
    message = f"the lines of {files} become {parts} captions each, such as {example}."
    advice = (
        "These files seem to hold one text each: to keep it whole, set disable_multiline_split "
        "to true."
    )
    report.warn(f"{dataset.id}.disable_multiline_split", f"{message} {advice}")
