"""type csv: a table of addresses, or of paths beside it, with a caption each."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from simpletuner.annexes.remote.store import CHUNK, DownloadError, Item, Offer, Store
from simpletuner.annexes.remote.web import read_url
from simpletuner.config.datasets import DatasetConfig
from simpletuner.data.captions import check_columns
from simpletuner.data.files import LARGEST_CLIP, LARGEST_PICTURE, MediaError, check_regular, read
from simpletuner.errors import Problem, Reading, shorten

WEB_PICTURE, WEB_CLIP = 10 << 20, 200 << 20  # bytes of one download
SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)  # of two letters or more: C:\ is a path


def list_table(config: DatasetConfig, store: Store) -> Reading[Offer]:
    """The rows of a table; of several with one address, the last."""
    table = yield from read_table(config)
    rows = {address: caption for address, caption in table if address}
    where, repeated = f"{config.id}.csv_file", sum(bool(address) for address, _ in table) - len(rows)
    if repeated:
        message = f"{repeated} rows repeat the address of another; the last of them is used."
        yield Problem(where, message, fatal=False)
    if len(rows) + repeated < len(table):
        empty = [str(number) for number, (address, _) in enumerate(table, 1) if not address]
        yield Problem(where, f"rows without an address: {shorten(empty)}.", fatal=False)
    base = Path(config.csv_file or "").parent
    items = [web_item(address, name_of(address), config, base) for address in rows]
    return Offer(items, {address: (caption,) if caption else () for address, caption in rows.items()})


def read_table(config: DatasetConfig) -> Reading[list[tuple[str, str]]]:
    """Address and caption of each row."""
    path, where = Path(config.csv_file or ""), f"{config.id}.csv_file"
    named = {"csv_url_column": config.csv_url_column, "csv_caption_column": config.csv_caption_column or ""}
    try:
        # Spreadsheets write a byte order mark; `newline=""` keeps line breaks inside quoted captions.
        table = csv.DictReader(io.StringIO(read(path, LARGEST_PICTURE).decode("utf-8-sig"), newline=""))
        columns = list(table.fieldnames or ())
        missing = list(check_columns(named, columns, config.id))
        yield from missing
        rows = [] if missing else list(table)
        address, caption = ([(row[column] or "").strip() for row in rows] for column in named.values())
        return list(zip(address, caption, strict=True))
    except MediaError as error:
        yield Problem(where, f"{str(path)!r} {error}.")
    except (UnicodeDecodeError, csv.Error) as error:
        yield Problem(where, f"{str(path)!r} is not a table in UTF-8: {error}.")
    return []


def name_of(address: str) -> str:
    """Path in the store without a suffix: the hash of the whole address, in 256 sub-folders."""
    digest = hashlib.sha256(address.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{digest[:2]}/{digest[:32]}"


def web_item(address: str, name: str, config: DatasetConfig, base: Path) -> Item:
    """What an address, or a path relative to `base`, refers to."""
    scheme = SCHEME.match(address)
    if scheme is None:
        path = base / address
        return Item(
            address, name, partial(copy_file, path, () if config.allow_private_urls else (base,)), _version(path)
        )
    if scheme[1].lower() not in ("http", "https"):
        # An item all the same, so that the plan lists its row with the reason.
        return Item(address, name, partial(_refuse, scheme[1]))
    most = WEB_CLIP if config.holds_clips else WEB_PICTURE
    return Item(address, name, partial(read_url, address, most, allow_private=config.allow_private_urls))


def _version(path: Path) -> str:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: NUL in the name
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}"


def copy_file(path: Path, folders: Sequence[Path]) -> Iterator[bytes]:
    """The content of a file of this machine in chunks.

    Args:
        folders: it must be below one of them, since anybody may have written the table; links below them may lead
            anywhere, since only somebody here made them. Without folders it may be anywhere.

    Raises:
        DownloadError: it is elsewhere, or cannot be read.
    """
    named, *roots = (os.path.abspath(each) for each in (path, *folders))  # noqa: PTH100 - links are not resolved
    if roots and not any(Path(named).is_relative_to(root) for root in roots):
        raise DownloadError("lies outside of the folder of its table; allow_private_urls accepts such files")
    try:
        check_regular(path, LARGEST_CLIP)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (MediaError, OSError) as error:
        raise DownloadError(str(error)) from error


def _refuse(scheme: str) -> Iterator[bytes]:
    raise DownloadError(f"is an address of {scheme}; http and https are downloaded")
