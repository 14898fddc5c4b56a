"""The folder that remote files are downloaded to.

`downloads.jsonl` records the name and version of every downloaded file, so that nothing is fetched twice and a killed
download continues; `failed.jsonl` lists what could not be downloaded, which is retried only on request.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter, ValidationError

from simpletuner.atomic import open_atomically, sweep_files, write_atomically
from simpletuner.data.clips import clip_suffix
from simpletuner.data.entries import ProgressBar
from simpletuner.data.files import MediaError
from simpletuner.data.media import sniff
from simpletuner.errors import UserError

WORKERS = 8
CHUNK = 1 << 18
PAUSES = (1.0, 4.0)  # seconds before the second and the third try
DOWNLOADS, FAILED = "downloads.jsonl", "failed.jsonl"
HEAD = 64  # bytes that show the format of a file
SUFFIXES = {"JPEG": ".jpg", "TIFF": ".tif", "HEIF": ".heic"}  # of pictures whose suffix is not the format's name


class DownloadError(Exception):
    """A file that cannot be downloaded; the text says why and fits after its address."""


class UnfetchedError(UserError):
    """Files of a remote dataset are not here, and this plan fetches none."""

    def __init__(self, files: str) -> None:
        super().__init__(f"{files} not fetched yet; `simpletuner plan` fetches them.")


class UnreachableError(DownloadError):
    """No answer, or not a complete one; another try may help."""


@dataclass(frozen=True)
class Item:
    """A remote file.

    Attributes:
        key: its address, unique in its source.
        name: path below the store; without a suffix if the content decides it.
        read: its content in chunks; may raise DownloadError.
        version: changes with the content, as far as the source tells.
        size: bytes, if the source tells; else 0.
    """

    key: str
    name: str
    read: Callable[[], Iterable[bytes]]
    version: str = ""
    size: int = 0


@dataclass(frozen=True)
class Offer:
    """The files of a remote dataset.

    Attributes:
        items: its files.
        captions: by the key of an item, where a table has them.
        ignored: what is not downloaded, with the reason as a category and as text.
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
        wanted: suffixes of files that the dataset takes.
        retry_failed: try again what failed in an earlier run.
        forgiven: try again what failed for a reason with these words, since a setting has changed.
        fetches: whether missing files are downloaded.
    """

    root: Path
    wanted: frozenset[str]
    retry_failed: bool = False
    forgiven: str = ""
    fetches: bool = True

    def __post_init__(self) -> None:
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._done = {record.key: record for record in _read_records(self.root / DOWNLOADS)}
        failed = [] if self.retry_failed else _read_records(self.root / FAILED)
        self.failed = {one.key: one for one in failed if not (self.forgiven and self.forgiven in one.reason)}

    def name_of(self, item: Item) -> str | None:
        """The local file of an item, or None if that version is missing or incomplete."""
        record = self._done.get(item.key)
        # A record's name may end in a suffix that the content decided.
        if record is None or record.version != item.version or not record.name.startswith(item.name):
            return None
        path = self.root / record.name
        return record.name if path.is_file() and path.stat().st_size == record.size else None

    def here(self, prefix: str) -> list[Item]:
        """The downloads from addresses with a common prefix, for plans that contact no server."""
        # `tuple` reads nothing: they are here.
        items = [Item(each.key, each.name, tuple, each.version, each.size) for each in self._done.values()]
        return [item for item in items if item.key.startswith(prefix) and self.name_of(item)]

    def missing(self, items: Iterable[Item]) -> list[Item]:
        """The items to download: neither here nor known to fail."""
        failed = {(record.key, record.version) for record in self.failed.values()}
        return [item for item in items if (item.key, item.version) not in failed and self.name_of(item) is None]

    def fetch(self, items: Sequence[Item], bar: ProgressBar) -> None:
        """Download items, several at a time.

        Raises:
            UserError: no server answers at all, or the disk is too small.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        # Younger temporary files may belong to a process that downloads into this folder now.
        sweep_files(self.root, deep=True, older_than=3600)
        needed, free = sum(item.size for item in items), shutil.disk_usage(self.root).free
        if needed > free:
            raise UserError(f"{self.root}: {needed / 1e9:.1f} GB are to be downloaded; {free / 1e9:.1f} GB are free.")
        errors: dict[Item, DownloadError] = {}
        pool = ThreadPoolExecutor(WORKERS)
        try:
            for future in as_completed([pool.submit(self._fetch, item, errors) for item in items]):
                bar.advance(1, future.result())
        finally:
            # After an error or Ctrl-C: ends the pauses between tries.
            self._stop.set()
            pool.shutdown(cancel_futures=True)
        # If nothing ever arrived, the network is to blame rather than the files.
        if not self._done and all(isinstance(error, UnreachableError) for error in errors.values()):
            item, error = next(iter(errors.items()))
            raise UserError(f"none of {len(items)} files can be downloaded; for instance {item.key} {error}.")
        # In the order of the source, whichever answer came first.
        failed = [item for item in items if item in errors]
        failures = {item.key: Attempt(item.key, item.version, reason=str(errors[item])) for item in failed}
        self._note({item.key for item in items}, failures)

    def _fetch(self, item: Item, errors: dict[Item, DownloadError]) -> str:
        for pause in (*PAUSES, None):
            try:
                self._save(item)
            except DownloadError as error:
                if isinstance(error, UnreachableError) and pause is not None and not self._stop.wait(pause):
                    continue
                errors[item] = error
            break
        return item.key

    def _save(self, item: Item) -> None:
        chunks = iter(item.read())
        head = b""
        # A server may send any number of bytes at a time.
        while len(head) < HEAD and (chunk := next(chunks, b"")):
            head += chunk
        name = item.name if PurePosixPath(item.name).suffix else item.name + self._suffix(head)
        # No fsync: a file that a power cut tears is shorter than its record says, and is fetched again.
        with open_atomically(self.root / name, durable=False) as file:
            file.write(head)
            for chunk in chunks:
                file.write(chunk)
            size = file.tell()
        # After the file: a kill in between only means that it is fetched again.
        record = Attempt(item.key, item.version, name, size)
        with self._lock, (self.root / DOWNLOADS).open("a", encoding="utf-8") as journal:
            journal.write(_line(record))
        self._done[item.key] = record

    def _suffix(self, head: bytes) -> str:
        try:
            suffix = clip_suffix(head) or SUFFIXES.get(kind := sniff(head), f".{kind.lower()}")
        except MediaError as error:
            raise DownloadError("is neither a picture nor a clip") from error
        if suffix not in self.wanted:
            raise DownloadError(f"is a {suffix} file, which this dataset does not take")
        return suffix

    def _note(self, tried: set[str], failures: Mapping[str, Attempt]) -> None:
        """Add failures to the list; another dataset with the same folder may have added its own."""
        others = {record.key: record for record in _read_records(self.root / FAILED) if record.key not in tried}
        self.failed |= failures
        if failures or (self.root / FAILED).exists():
            write_atomically(self.root / FAILED, "".join(map(_line, [*others.values(), *failures.values()])))


def _line(record: Attempt) -> str:
    return json.dumps({key: value for key, value in asdict(record).items() if value}, ensure_ascii=False) + "\n"


def _read_records(path: Path) -> Iterator[Attempt]:
    """The lines of a journal; a kill may have cut the last one."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            yield _RECORD.validate_json(line)
        except ValidationError:
            continue
