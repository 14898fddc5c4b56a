"""Captions that are not used as they are meant: files of other programs, and texts that are split
into lines.
"""

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
MOST_OPENED = 20  # files of a kind, to look for captions
MOST_NAMED = 3
LOOKED_INTO = 1 << 16  # bytes of a file that may hold captions
CAPTION_KEY = re.compile(rb"""["'](?:captions?|prompt|text|tags)["']\s*:""")
CAPTION_COLUMN = re.compile(
    rb"(?:^|[,;\t\"])(?:captions?|prompt|text)(?:$|[,;\t\"\r])", re.MULTILINE
)


def unused_captions(entry: DatasetConfig, dataset: Dataset, report: Problems) -> None:
    """Report captions in the folder that the dataset does not use; an error if it has no samples
    without them.

    Args:
        entry: the dataset's entry with its defaults filled in.
    """
    if entry.only_instance_prompt:  # which says that captions are not used
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
        report.append(Problem(f"{entry.id}.caption_strategy", message, is_fatal, kind="captions"))


def unread_repeats(entry: DatasetConfig, dataset: Dataset, report: Problems) -> None:
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
        if concept is None or concept[0] == 1:
            continue
        message = (
            f"the repeats and words of the folder {title!r} are not read from its name: set "
            "repeats to"
        )
        advice = "for several such folders, make an entry for each. `simpletuner start` does that"
        report.warn(f"{entry.id}.repeats", f"{message} {concept[0] - 1}; {advice}.")
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
    media = {composed(name) for name in listing.files} | {pair_key(name) for name in listing.files}
    sentences: list[str] = []
    for suffix, names in kinds.items():
        beside = [name for name in names if pair_key(name) in media]
        sentences += _about_texts(root, suffix, beside)
        if suffix in TABLES:
            sentences += _about_tables(
                root, suffix, [name for name in names if pair_key(name) not in media]
            )
    return sentences


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


def _about_tables(root: Path, suffix: str, names: Sequence[str]) -> Iterator[str]:
    """A sentence about each of the first tables of captions; a folder may hold thousands of files
    of this kind.
    """
    tables = [name for name in names[:MOST_OPENED] if _has_captions(root / name)]
    for name in tables[:MOST_NAMED]:
        yield TABLES[suffix].format(name)


def _about_texts(root: Path, suffix: str, names: Sequence[str]) -> Iterator[str]:
    """A sentence about files beside pictures or clips."""
    files = counted(len(names), f"{suffix} file")
    if names and suffix in OTHER_TEXTS:
        yield (
            f"{files} beside pictures or clips ({names[0]}) may hold captions: rename them to .txt."
        )
    if names and suffix == ".json" and _has_captions(root / names[0]):
        advice = "write each caption into a .txt file of the same name"
        hold = "holds" if len(names) == 1 else "hold"
        yield (
            f"{files} beside pictures or clips ({names[0]}) {hold} captions, which are not read: "
            f"{advice}."
        )


def _has_captions(path: Path) -> bool:
    """Whether a file that is no picture or clip seems to hold captions."""
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


def split_texts(dataset: Dataset, report: Problems) -> None:
    """Warn about caption files that seem to hold one text and become a caption per line."""
    config = dataset.config
    if (
        config.caption_strategy != "textfile"
        or config.disable_multiline_split
        or config.only_instance_prompt
    ):
        return
    read = {
        dataset.folder.listing.captions.get(sample.name, sample.name): sample.name
        for sample in dataset.samples
    }
    facts = {file: dataset.facts[name] for file, name in read.items()}
    split = {
        file: fact.captions
        for file, fact in facts.items()
        if fact.is_one_text and len(fact.captions) > 1
    }
    if not split:
        return
    file, captions = next(iter(split.items()))
    numbers = sorted({len(parts) for parts in split.values()})
    parts = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}"
    files = f"{len(split)} of {counted(len(read), 'caption file')}"
    message = (
        f"the lines of {files} become {parts} captions each, such as {min(captions, key=len)!r} "
        f"of {file}."
    )
    advice = (
        "These files seem to hold one text each: to keep it whole, set disable_multiline_split "
        "to true."
    )
    report.warn(f"{dataset.id}.disable_multiline_split", f"{message} {advice}")
