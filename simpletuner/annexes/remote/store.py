"""The download folder of a remote dataset: its files, failed downloads, and their retries.

`downloads.jsonl` records the name and version of every downloaded file, so that no file is
downloaded twice and a killed download resumes. `failed.jsonl` lists failed downloads, which are
retried only on request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import open_atomically, sweep_files, write_atomically
from simpletuner.data.clips import clip_suffix
from simpletuner.data.entries import ProgressBar
from simpletuner.data.files import MediaError
from simpletuner.data.picture_formats import sniff
from simpletuner.errors import UserError

WORKERS = 8
CHUNK = 1 << 18
PAUSES = (1.0, 4.0)  # seconds before the second and the third attempt
DOWNLOADS = "downloads.jsonl"
FAILED = "failed.jsonl"
HEAD = 64  # bytes needed to detect the format of a file
# Of formats whose suffix is not their name.
SUFFIXES = {"JPEG": ".jpg", "TIFF": ".tif", "HEIF": ".heic"}


class DownloadError(Exception):
    """A file cannot be downloaded; the message is a predicate that follows the address."""


class UnfetchedError(UserError):
    """Files of a remote dataset are not downloaded, and this plan must not download them."""

    def __init__(self, files: str) -> None:
        super().__init__(f"{files} not fetched yet; `simpletuner plan` fetches them.")


class UnreachableError(DownloadError):
    """No response, or an incomplete one; a retry may help."""


@dataclass(frozen=True)
class Item:
    """A remote file.

    Attributes:
        key: address, unique within the source.
        name: path below the store, without the suffix, which the content determines.
        read: returns the content in chunks; may raise DownloadError.
        version: changes with the content, if the source reports versions.
    """

    key: str
    name: str
    read: Callable[[], Iterable[bytes]]
    version: str = ""


@dataclass(frozen=True)
class RemoteFiles:
    """The files that a remote dataset has.

    Attributes:
        items: the files to download.
        captions: captions from a table, by key of the item.
        ignored: keys of files that are not downloaded, with a category and a reason.
    """

    items: Sequence[Item]
    captions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Attempt:
    """A line of `downloads.jsonl` or, with a reason, of `failed.jsonl`."""

    key: str
    version: str = ""
    name: str = ""
    size: int = 0
    reason: str = ""


_RECORD = TypeAdapter(Attempt)


@dataclass
class Store:
    """A folder of downloads.

    Attributes:
        accepted: suffixes that the dataset accepts.
        retry_failed: retry downloads that failed in earlier runs.
        forgiven: retry downloads that failed for a reason containing this text, since a setting has
            changed.
        fetches: whether to download missing files.
    """

    root: Path
    accepted: frozenset[str]
    retry_failed: bool = False
    forgiven: str = ""
    fetches: bool = True

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = {record.key: record for record in _read_records(self.root / DOWNLOADS)}
        self.failed: dict[str, Attempt] = {}
        if self.retry_failed:
            return
        for record in _read_records(self.root / FAILED):
            is_forgiven = self.forgiven and self.forgiven in record.reason
            if not is_forgiven:
                self.failed[record.key] = record

    def name_of(self, item: Item) -> str | None:
        """The local file of an item; None if this version is missing or incomplete."""
        record = self._done.get(item.key)
        if record is None or record.version != item.version:
            return None
        # A record's name has a suffix, determined by the content.
        if not record.name.startswith(item.name):
            return None
        path = self.root / record.name
        if not path.is_file() or path.stat().st_size != record.size:
            return None
        return record.name

    def missing(self, items: Iterable[Item]) -> list[Item]:
        """The items to download: neither downloaded nor failed before."""
        failed = {(record.key, record.version) for record in self.failed.values()}
        missing = []
        for item in items:
            if (item.key, item.version) not in failed and self.name_of(item) is None:
                missing.append(item)
        return missing

    def fetch(self, items: Sequence[Item], bar: ProgressBar) -> None:
        """Download items in parallel.

        Raises:
            UserError: no server responds.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        # Younger temporary files may belong to another process that downloads into this folder.
        sweep_files(self.root, deep=True, older_than=3600)
        errors: dict[Item, DownloadError] = {}
        pool = ThreadPoolExecutor(WORKERS)
        try:
            futures = [pool.submit(self._fetch, item, errors) for item in items]
            for future in as_completed(futures):
                bar.advance(1, future.result())
        finally:
            # After an error or Ctrl-C, this ends the pauses between attempts.
            self._stop.set()
            pool.shutdown(cancel_futures=True)
        # If no download ever succeeded, the cause is the network, not the files.
        if not self._done and all(isinstance(error, UnreachableError) for error in errors.values()):
            item, error = next(iter(errors.items()))
            raise UserError(
                f"none of {len(items)} files can be downloaded; for instance {item.key} {error}."
            )
        failures: dict[str, Attempt] = {}
        for item in items:  # in the order of the source, not of the responses
            if item in errors:
                failures[item.key] = Attempt(item.key, item.version, reason=str(errors[item]))
        self._record_failures({item.key for item in items}, failures)

    def _fetch(self, item: Item, errors: dict[Item, DownloadError]) -> str:
        """Download an item in up to three attempts; returns its key.

        Args:
            errors: the error of an item that cannot be downloaded is added to it.
        """
        for pause in (*PAUSES, None):  # None marks the last attempt
            try:
                self._save(item)
                break
            except UnreachableError as error:
                if pause is None or self._stop.wait(pause):
                    errors[item] = error
                    break
            except DownloadError as error:
                errors[item] = error
                break
        return item.key

    def _save(self, item: Item) -> None:
        """Download an item, and record it."""
        chunks = iter(item.read())
        head = b""
        while len(head) < HEAD:  # chunks may have any size
            chunk = next(chunks, b"")
            if not chunk:
                break
            head += chunk
        name = item.name + self._suffix(head)
        # No fsync: a file truncated by a power cut is shorter than recorded, and is downloaded
        # again.
        with open_atomically(self.root / name, durable=False) as file:
            file.write(head)
            for chunk in chunks:
                file.write(chunk)
            size = file.tell()
        # Recorded after the file: a kill in between only causes another download.
        record = Attempt(item.key, item.version, name, size)
        with self._lock, (self.root / DOWNLOADS).open("a", encoding="utf-8") as journal:
            journal.write(_line(record))
        self._done[item.key] = record

    def _suffix(self, head: bytes) -> str:
        """The suffix for the format of a file, by its first bytes."""
        suffix = clip_suffix(head)
        if not suffix:
            try:
                kind = sniff(head)
            except MediaError as error:
                raise DownloadError("is neither a picture nor a clip") from error
            suffix = SUFFIXES.get(kind, f".{kind.lower()}")
        if suffix not in self.accepted:
            raise DownloadError(f"is a {suffix} file, which this dataset does not accept")
        return suffix

    def _record_failures(self, tried: set[str], failures: Mapping[str, Attempt]) -> None:
        """Update the list of failures, keeping those of other datasets that share the folder."""
        self.failed |= failures
        path = self.root / FAILED
        records = {record.key: record for record in _read_records(path) if record.key not in tried}
        records |= failures
        if failures or path.exists():
            write_atomically(path, "".join(map(_line, records.values())))


def _line(record: Attempt) -> str:
    """A record as a line of a journal, without empty values."""
    values = {key: value for key, value in asdict(record).items() if value}
    return json.dumps(values, ensure_ascii=False) + "\n"


def _read_records(path: Path) -> Iterator[Attempt]:
    """The lines of a journal, without invalid ones: a kill may have truncated the last line."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            yield _RECORD.validate_json(line)
        except ValidationError:
            continue
