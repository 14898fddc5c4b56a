"""The captions of a picture: from text files, file names, fixed prompts or a table.

A picture may have several alternatives; one of them is drawn each time it is used.
"""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from simpletuner.config.datasets import DatasetConfig

from .discovery import pair_key

UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

Edit = Callable[[str], Sequence[str]]  # a caption in, its replacements out


class CaptionError(Exception):
    """A picture without a usable caption; the text says why and fits after the file's name."""


@dataclass(frozen=True)
class CaptionSource:
    """Where the captions of one dataset come from.

    Attributes:
        config: the dataset's entry with its defaults filled in.
        root: its folder.
        files: caption file by `pair_key`, as found by the scan.
        table: captions by picture name, from a parquet table.
        edits: what happens to each caption afterwards, in this order.
    """

    config: DatasetConfig
    root: Path
    files: Mapping[str, str]
    table: Mapping[str, tuple[str, ...]]
    edits: tuple[Edit, ...] = ()


def captions_for(name: str, source: CaptionSource) -> tuple[str, ...]:
    """All alternatives for a picture, at least one.

    Args:
        name: path below the dataset's folder.
        source: where its captions come from.

    Raises:
        CaptionError: it has none.
    """
    config = source.config
    prompts = tuple(config.instance_prompt or ())
    if config.only_instance_prompt or config.caption_strategy in ("instanceprompt", "instance_prompt"):
        captions = prompts
    else:
        captions = _own_captions(name, source)
        if config.prepend_instance_prompt:
            captions = tuple(f"{prompt} {caption}" for prompt in prompts for caption in captions)
    for edit in source.edits:
        captions = tuple(edited for caption in captions for edited in edit(caption))
    captions = tuple(caption for caption in captions if caption)
    if not captions:
        raise CaptionError("has a caption of which nothing is left after caption_filter_list")
    return captions


def _own_captions(name: str, source: CaptionSource) -> tuple[str, ...]:
    if source.config.caption_strategy == "filename":
        return (caption_of_name(name),)
    if source.config.caption_strategy == "parquet":
        captions = source.table.get(name, ())
        if not captions:
            raise CaptionError("has no caption in the table")
        return captions
    file = source.files.get(pair_key(name))
    if file is None:
        raise CaptionError(f"has no caption file {PurePosixPath(name).with_suffix('.txt').name!r} beside it")
    return read_caption_file(source.root / file, whole=source.config.disable_multiline_split)


def caption_of_name(name: str) -> str:
    """The stem of a file name with spaces for `_`.

    Raises:
        CaptionError: nothing is left.
    """
    caption = " ".join(unicodedata.normalize("NFC", PurePosixPath(name).stem).replace("_", " ").split())
    if not caption:
        raise CaptionError("has a name that gives no caption")
    return caption


def read_caption_file(path: Path, *, whole: bool = False) -> tuple[str, ...]:
    """The captions in a text file: every line that is not empty, or the whole text as one.

    UTF-8 with or without a byte order mark, UTF-16 with one.

    Raises:
        CaptionError: unreadable, in another encoding, or empty.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-16" if content.startswith(UTF16_MARKS) else "utf-8-sig")
    except OSError as error:
        raise CaptionError(f"has a caption file that cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CaptionError(f"has a caption file that is not UTF-8 text (byte {error.start})") from error
    lines = [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    captions = ("\n".join(lines).strip(),) if whole else tuple(lines)
    captions = tuple(caption for caption in captions if caption)
    if not captions:
        raise CaptionError("has an empty caption file")
    return captions
