"""The captions of a picture: from text files, file names, fixed prompts or a table.

A picture may have several captions; one of them is drawn each time it is used.
"""

from __future__ import annotations

import codecs
import os
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import regex

from simpletuner.config.datasets import FIXED_PROMPTS, CaptionShuffle, DatasetConfig
from simpletuner.config.json_reader import read_json, read_text, reported_under
from simpletuner.config.remote import SOURCES
from simpletuner.data.caption_tables import CaptionTable, match_rows, read_metadata, read_parquet
from simpletuner.data.chance import generator
from simpletuner.data.charsets import encoding_advice
from simpletuner.data.discovery import Folder
from simpletuner.data.file_index import NO_FACTS, FileFacts
from simpletuner.data.files import LARGEST_CAPTION, LeftOutError, UnreadableError, read_file
from simpletuner.data.sample import UNCAPTIONED
from simpletuner.errors import Problems, UserError

COARSEST_CLOCK = 3.0  # seconds; file systems round times, FAT to two seconds
FILTER_SECONDS = 5.0  # for one expression on one caption: some expressions take exponential time
FILTERS = "caption_filter_list"
EMPTY = "has an empty caption file"
LONGEST_SHOWN = 200  # characters of a caption in a message
UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

no_caption, bad_caption = (partial(LeftOutError, reason) for reason in UNCAPTIONED)

PARAGRAPH = 80  # characters; shorter lines are captions
# A line that cannot be a caption by itself: only punctuation, an item of a list, a heading, a line
# that ends in a colon, JSON.
FRAGMENT = re.compile(
    r"[\W_]+$|[-*•]\s|\d{1,2}[.)]\s|#{1,6}\s|\*\*|```|.*:$|\{?\s*[\"'][\w ]+[\"']\s*:"
)

Edit = Callable[[str], Sequence[str]]  # maps a caption to its replacements

# Tokenizers read these as control tokens: in a caption they would end the prompt or refer to a
# missing picture.
CONTROL_TOKEN = re.compile(
    r"<\|\w+\|>|</?(?:s|bos|eos|pad|unk|mask|start_of_turn|end_of_turn|image|start_of_image)>"
)


def control_token(text: str) -> str | None:
    """The first control token in a text, or None."""
    if "<" not in text:  # saves the search in nearly all captions
        return None
    match = CONTROL_TOKEN.search(text)
    return match.group() if match else None


@dataclass(frozen=True)
class CaptionSource:
    """Where the captions of one dataset come from.

    Attributes:
        config: the dataset's entry with its defaults filled in.
        folder: the dataset's folder as read.
        table: captions by picture name, from a table or from the hub.
        edits: applied to each caption, in this order.
        facts: file facts by name; the captions of a new or changed caption file are added when it
            is read.
    """

    config: DatasetConfig
    folder: Folder
    table: CaptionTable
    edits: tuple[Edit, ...] = ()
    facts: dict[str, FileFacts] = field(default_factory=dict)


def caption_source(
    entry: DatasetConfig,
    folder: Folder,
    text_filter: Callable[[DatasetConfig], Edit | None],
    report: Problems,
) -> CaptionSource:
    """The caption table and edits of an entry.

    Args:
        text_filter: maps the entry to the edit of its text_embeds entry.
    """
    table = folder.listing.table
    # Damaged and excluded files, too: their rows belong to no other file.
    names = sorted({*folder.listing.files, *folder.facts})
    if entry.metadata_backend == "parquet" and entry.parquet is not None:
        rows = read_parquet(entry.parquet, report)
        table = match_rows(rows, names, "parquet.filename_column", report)
    elif entry.caption_strategy == "metadata":
        rows = read_metadata(folder, report)
        table = match_rows(rows, names, "caption_strategy", report)
    edits = [text_filter(entry), shuffle_edit(entry.caption_shuffle)]
    return CaptionSource(
        config=entry,
        folder=folder,
        table=table,
        edits=tuple(edit for edit in edits if edit is not None),
        facts={**folder.facts},
    )


def captions_for(name: str, source: CaptionSource) -> tuple[str, ...]:
    """All captions of a picture, at least one.

    Args:
        name: path below the dataset's folder.
        source: where the dataset's captions come from.

    Raises:
        LeftOutError: the picture has no caption.
        UserError: an expression of `caption_filter_list` takes too long.
    """
    known = source.facts.get(name)
    # Without a stamp, the captions in the index are already edited.
    if known and name in source.folder.gone and known.captions and not known.stamp:
        return known.captions
    path = str(source.folder.root / name)
    captions = _edited(_written(name, source), source.edits, path)
    for caption in captions:
        token = control_token(caption)
        if token is not None:
            detail = f"has a caption with {token}, a control token of the tokenizer; remove it"
            raise no_caption(detail)
    return captions


def _written(name: str, source: CaptionSource) -> tuple[str, ...]:
    """The captions of a picture as they are written, with the instance prompts."""
    config = source.config
    prompts = tuple(config.instance_prompt or ())
    if config.only_instance_prompt or config.caption_strategy in FIXED_PROMPTS:
        return prompts
    captions = _captions_without_prompt(name, source)
    if not config.prepend_instance_prompt:
        return captions
    return tuple(f"{prompt} {caption}" for prompt in prompts for caption in captions)


def _edited(captions: tuple[str, ...], edits: Sequence[Edit], path: str) -> tuple[str, ...]:
    """The captions after all edits, each of which may yield several.

    Args:
        path: of the file, for the error.
    """
    for edit in edits:
        edited: list[str] = []
        for caption in captions:
            try:
                edited += edit(caption)
            except TimeoutError as error:
                raise UserError(f"{path!r}: {error}.") from None
        captions = tuple(edited)
    captions = tuple(caption for caption in captions if caption)
    if not captions:
        raise no_caption("has a caption that caption_filter_list leaves empty")
    return captions


def _captions_without_prompt(name: str, source: CaptionSource) -> tuple[str, ...]:
    strategy = source.config.caption_strategy
    if strategy == "filename":
        return (caption_of_name(name),)
    if strategy in ("parquet", "metadata", *SOURCES):
        captions = source.table.get(name, ())
        if not captions:
            raise no_caption("has no caption in the table")
        return captions
    return _captions_of_file(name, source)


def _captions_of_file(name: str, source: CaptionSource) -> tuple[str, ...]:
    """The captions in the text file of a picture, which is read only if it has changed."""
    folder = source.folder
    known = source.facts.get(name, NO_FACTS)
    file = folder.listing.captions.get(name)
    if file is None:
        if name in folder.gone and known.stamp:
            return known.captions
        expected = PurePosixPath(name).with_suffix(".txt").name
        raise no_caption(f"has no caption file {expected!r} beside it")
    whole = source.config.disable_multiline_split
    stamp = caption_stamp(f"{folder.root}/{file}", whole=whole)
    if stamp is None or stamp != known.stamp:
        content = read_caption_file(folder.root / file, whole=whole)
        # Facts are saved in the index, so the next start opens no unchanged caption file.
        known = replace(
            known, captions=content.captions, stamp=stamp, is_one_text=content.is_one_text
        )
        source.facts[name] = known
    return known.captions


def caption_stamp(path: str, *, whole: bool) -> str | None:
    """A stamp that changes if the captions may have: how the file is split, its size, times, inode.

    The ctime cannot be set, so an edit that restores the mtime is noticed too. None if the file is
    missing, or so new that a later change could have the same times.
    """
    try:
        status = os.stat(path)  # noqa: PTH116 - pathlib takes three times as long
    except OSError:
        return None
    if time.time() - status.st_ctime < COARSEST_CLOCK:
        return None
    way = "whole" if whole else "lines"
    return f"{way} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def caption_of_name(name: str) -> str:
    """The stem of a file name with `_` replaced by spaces.

    Raises:
        LeftOutError: it is empty.
    """
    # macOS stores names decomposed (NFD), which tokenizers split differently.
    stem = unicodedata.normalize("NFC", PurePosixPath(name).stem)
    caption = " ".join(stem.replace("_", " ").split())
    if not caption:
        raise no_caption("has a name that yields no caption")
    return caption


class CaptionFile(NamedTuple):
    """The captions in a text file; `is_one_text` if its lines seem to be parts of one text."""

    captions: tuple[str, ...]
    is_one_text: bool


def read_caption_file(path: Path, *, whole: bool = False) -> CaptionFile:
    """The captions in a text file: each non-empty line, or the whole text as one.

    Raises:
        LeftOutError: unreadable, in another encoding, or empty.
        DeviceError: the device failed.
    """
    # Not `splitlines`, which also breaks at form feeds, U+0085 and U+2028 inside a caption.
    lines = [line.strip() for line in read_caption_text(path).split("\n")]
    captions = ["\n".join(lines).strip()] if whole else lines
    captions = [caption for caption in captions if caption]
    if not captions:
        raise no_caption(EMPTY)
    return CaptionFile(tuple(captions), is_one_text(lines))


def is_one_text(lines: Sequence[str]) -> bool:
    """Whether lines seem to be parts of one text instead of alternative captions.

    Such texts are JSON, a list or paragraphs.

    Args:
        lines: without spaces at their ends; blank ones separate paragraphs.
    """
    texts = [line for line in lines if line]
    if len(texts) < 2:
        return False
    if any(FRAGMENT.match(text) for text in texts):
        return True
    if max(len(text) for text in texts) < PARAGRAPH:
        return False
    # A blank line counts only between texts, not at the start or the end of the file.
    first = lines.index(texts[0])
    last = len(lines) - lines[::-1].index(texts[-1])
    has_paragraphs = "" in lines[first:last]
    return has_paragraphs or any(_continues(*pair) for pair in pairwise(texts))


def _continues(line: str, following: str) -> bool:
    """Whether a sentence continues on the next line, as in a text with hard line breaks."""
    return len(line) >= PARAGRAPH // 2 and line[-1] not in ".!?。！？।" and following[0].islower()


def read_caption_text(path: Path) -> str:
    """The text of a caption file, with `\\n` line endings.

    Accepts UTF-8 with or without a byte order mark, and UTF-16 with one.

    Raises:
        LeftOutError: unreadable, or in another encoding.
        DeviceError: the device failed.
    """
    try:
        content = read_file(path, LARGEST_CAPTION)
    except UnreadableError as error:
        raise bad_caption(f"has a caption file that {error}") from error
    encoding = "utf-16" if content.startswith(UTF16_MARKS) else "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        advice = encoding_advice(content)
        detail = f"has a caption file that is not UTF-8 text (byte {error.start}): {advice}"
        raise bad_caption(detail) from error
    # UTF-16 without a mark decodes as UTF-8, with a NUL next to every Latin letter.
    if "\0" in text:
        raise bad_caption(
            "has a caption file with NUL characters: UTF-16 without a byte order mark? Save "
            "it as UTF-8"
        )
    return text.replace("\r\n", "\n").replace("\r", "\n")


# (split at, join with)
SEPARATORS = {"comma": (",", ", "), "space": (" ", " "), "period": (".", ". ")}
REPLACEMENT = re.compile(r"s/((?:[^/\\]|\\.)*)/((?:[^/\\]|\\.)*)/?")


def shuffle_edit(settings: CaptionShuffle | None) -> Edit | None:
    """The edit that a dataset's `caption_shuffle` asks for, or None."""
    if settings is None or not settings.enable:
        return None
    return partial(_shuffle, settings)


def _shuffle(settings: CaptionShuffle, caption: str) -> Sequence[str]:
    """The caption and its shuffled forms, without duplicates; depends on text and seed only."""
    splitter, joiner = SEPARATORS[settings.split_on]
    parts = [part.strip() for part in caption.split(splitter) if part.strip()]
    fixed = parts[: settings.position_start]
    movable = parts[settings.position_start :]
    forms = [caption] if settings.include_original else []
    # Splitting removes the final period.
    end = "." if settings.split_on == "period" and caption.endswith(".") else ""
    for number in range(settings.count):
        order = list(movable)
        generator("caption shuffle", settings.seed, caption, number).shuffle(order)
        forms.append(joiner.join(fixed + order) + end)
    return list(dict.fromkeys(forms))


def read_filters(value: Any, report: Problems) -> Edit | None:
    """The edit that a text_embeds entry's `caption_filter_list` asks for, or None.

    Args:
        value: a list of texts, or a file with one per line or a JSON list of them.
    """
    if value is None:
        return None
    entries = value
    if isinstance(value, str):
        entries = _read_list(Path(value), report)
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        report.error(FILTERS, f"{value!r} is neither a list of texts nor a file that holds one.")
        return None
    filters = [_read_filter(entry, report) for entry in entries if entry]
    return partial(_filter, filters)


def _read_list(path: Path, report: Problems) -> list[Any]:
    with reported_under(FILTERS, path, report) as file_report:
        if path.suffix.lower() == ".json":
            content = read_json(path, file_report, list | str, "a JSON list of texts")
            if isinstance(content, str):
                return [content]
            return content or []
        text = read_text(path, file_report) or ""
    return [line for line in text.splitlines() if line.strip()]


class CaptionFilter(NamedTuple):
    """One entry of `caption_filter_list`: plain text to remove, or an expression to replace.

    Most entries may be either, and only the caption shows which is meant.
    """

    literal: str | None
    expression: regex.Pattern[str] | None
    replacement: str


def _read_filter(entry: str, report: Problems) -> CaptionFilter:
    substitution = REPLACEMENT.fullmatch(entry)
    pattern = entry
    replacement = ""
    if substitution:
        pattern = substitution[1]
        replacement = substitution[2].replace(r"\/", "/")
    try:
        # Raises if the replacement refers to a group that does not exist.
        re.compile(pattern).sub(replacement, "")
        expression = regex.compile(pattern)  # the same syntax, with a time limit
    except (re.error, regex.error, IndexError) as error:
        if substitution:
            report.error(FILTERS, f"{entry!r} is not a regular expression: {error}.")
        # Plain text such as "(wide shot" need not be a regular expression.
        return CaptionFilter(entry, None, "")
    literal = None if substitution else entry
    return CaptionFilter(literal, expression, replacement)


def _filter(filters: Sequence[CaptionFilter], caption: str) -> Sequence[str]:
    """Treat each entry as plain text if the caption contains it, else as a regular expression.

    Raises:
        TimeoutError: an expression takes too long.
    """
    for literal, expression, replacement in filters:
        if literal is not None and literal in caption:
            caption = caption.replace(literal, "")
        elif expression is not None:
            try:
                caption = expression.sub(replacement, caption, timeout=FILTER_SECONDS)
            except TimeoutError:
                shown = caption[:LONGEST_SHOWN]
                filtering = f"{expression.pattern!r} of caption_filter_list on {shown!r}"
                raise TimeoutError(f"{filtering} takes more than {FILTER_SECONDS:g} s") from None
    # Removed words leave two spaces.
    return [re.sub(r"[ \t]{2,}", " ", caption).strip()]
