"""The captions in a folder: which are used, how a dataset reads them, and notes about the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

from simpletuner.data.caption_checks import foreign_captions
from simpletuner.data.caption_tables import CaptionTable, match_rows, read_metadata
from simpletuner.data.captions import CaptionFile, read_caption_file
from simpletuner.data.discovery import Folder, Scan
from simpletuner.data.files import LeftOutError
from simpletuner.errors import Problems, counted, shorten

# Files that are opened before the first question; a folder may contain thousands.
MOST_OPENED = 200
# Files that are listed by name.
MOST_NAMED = 3


@dataclass(frozen=True)
class FolderCaptions:
    """The captions of the pictures or clips in a folder.

    Attributes:
        folder: the dataset's folder.
        files: what it contains.
    """

    folder: Path
    files: Scan

    @cached_property
    def _problems(self) -> Problems:
        """Why the tables in the folder cannot be used."""
        return Problems()

    @cached_property
    def _table(self) -> CaptionTable:
        """Captions from metadata.jsonl and metadata.csv; empty if they cannot be used."""
        if not self.files.metadata:
            return {}
        rows = read_metadata(Folder(self.folder, {}, self.files), self._problems)
        table = match_rows(rows, self.files.files, ", ".join(self.files.metadata), self._problems)
        if self._problems.are_fatal:
            return {}
        return {name: captions for name, captions in table.items() if captions}

    @cached_property
    def is_table(self) -> bool:
        """Whether metadata.jsonl or metadata.csv captions more files than caption files do."""
        return len(self._table) > len(self.files.captions)

    @cached_property
    def _opened(self) -> tuple[Mapping[str, CaptionFile], Mapping[str, str]]:
        """The usable ones of the first caption files, and why the rest cannot be used, by name."""
        contents: dict[str, CaptionFile] = {}
        reasons: dict[str, str] = {}
        for name in islice(dict.fromkeys(self.files.captions.values()), MOST_OPENED):
            try:
                contents[name] = read_caption_file(self.folder / name)
            except LeftOutError as error:
                reasons[name] = str(error)
        return contents, reasons

    @property
    def _contents(self) -> Mapping[str, CaptionFile]:
        """The first caption files that can be used, by name."""
        contents, _ = self._opened
        return contents

    @cached_property
    def is_whole(self) -> bool:
        """Whether most caption files of several lines hold a single text."""
        several = [content for content in self._contents.values() if len(content.captions) > 1]
        texts = [content for content in several if content.is_one_text]
        return not self.is_table and len(texts) * 2 > len(several)

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of a dataset that read these captions, besides `caption_strategy` `textfile`."""
        if self.is_table:
            return {"caption_strategy": "metadata"}
        if self.is_whole:
            return {"disable_multiline_split": True}
        return {}

    def has(self, name: str) -> bool:
        """Whether a picture or clip has a caption."""
        if self.is_table:
            return name in self._table
        return name in self.files.captions

    def why_unusable(self, name: str) -> str:
        """Why the caption file of a file cannot be used, as a text that continues the file's name.

        Empty if it can be used, and for files after the first `MOST_OPENED`.
        """
        if self.is_table or name not in self.files.captions:
            return ""
        _, reasons = self._opened
        return reasons.get(self.files.captions[name], "")

    def without(self, words: str) -> list[str]:
        """The captions, of the first files, that do not contain these words."""
        pattern = re.compile(rf"(?<!\w){re.escape(words)}(?!\w)", re.IGNORECASE)
        return [caption for caption in self.texts if not pattern.search(caption)]

    def mention(self, words: str) -> bool:
        """Whether most captions contain these words."""
        return len(self.without(words)) * 2 < len(self.texts)

    @cached_property
    def texts(self) -> list[str]:
        """The captions of the first files, as they are trained."""
        if self.is_table:
            return [*chain.from_iterable(islice(self._table.values(), MOST_OPENED))]
        contents = self._contents.values()
        if self.is_whole:
            return ["\n".join(content.captions) for content in contents]
        return [*chain.from_iterable(content.captions for content in contents)]

    def notes(self) -> list[str]:
        """Sentences about how captions are read, and about those that are not used."""
        notes = []
        if self.is_table:
            notes.append(
                f"Captions are read from {shorten(self.files.metadata)} (caption_strategy "
                "metadata)."
            )
        if self.is_whole:
            notes.append(
                "The caption files hold one text each and are not split into lines "
                "(disable_multiline_split)."
            )
        notes += self._about_unused_files()
        notes += self._about_tables()
        if not all(self.has(name) for name in self.files.files):
            for sentence in foreign_captions(self.folder, self.files):
                notes.append(f"Not used: {sentence}")
        return notes

    def _about_unused_files(self) -> Iterator[str]:
        """A sentence about caption files that are not used."""
        unused = {
            name: explanation
            for name, (reason, explanation) in self.files.ignored.items()
            if reason == "unused caption"
        }
        if self.is_table and self.files.captions:
            count = counted(len({*self.files.captions.values()}), "caption file")
            yield f"Not used: {count}, since the table captions more files."
        elif unused:
            first, explanation = next(iter(unused.items()))
            yield f"Not used: {counted(len(unused), 'caption file')}; {first} {explanation}."

    def _about_tables(self) -> Iterator[str]:
        """Sentences about tables that are not used, or that name missing files."""
        unused = shorten(self.files.metadata, MOST_NAMED)
        if self._table and not self.is_table:
            yield (
                f"Not used: the captions in {unused}, since caption files caption as many files "
                "or more."
            )
        for problem in self._problems:
            yield f"Not used: {problem.message}" if problem.fatal else problem.message
