"""Lists datasets of type csv: a table of addresses, or of paths relative to it, with captions."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from simpletuner.annexes.remote.store import CHUNK, DownloadError, Item, RemoteFiles, Store
from simpletuner.annexes.remote.web import read_url
from simpletuner.config.datasets import DatasetConfig
from simpletuner.data.caption_tables import check_columns
from simpletuner.data.files import (
    LARGEST_CLIP,
    LARGEST_PICTURE,
    MediaError,
    check_regular,
    read_file,
)
from simpletuner.errors import Problems, shorten
from simpletuner.hashing import hash_text

WEB_PICTURE = 10 << 20  # bytes of one download
WEB_CLIP = 200 << 20
SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)  # two letters or more: C:\ is a path


def list_table(config: DatasetConfig, store: Store, report: Problems) -> RemoteFiles:
    """The rows of a table; of rows with the same address, the last."""
    table = read_table(config, report)
    rows = {address: caption for address, caption in table if address}
    where = f"{config.id}.csv_file"
    empty = [str(number) for number, (address, _) in enumerate(table, 1) if not address]
    repeated = len(table) - len(empty) - len(rows)
    if repeated:
        report.warn(
            where, f"{repeated} rows repeat the address of another row; the last one is used."
        )
    if empty:
        report.warn(where, f"rows without an address: {shorten(empty)}.")
    folder = Path(config.csv_file or "").parent
    items = [web_item(address, name_of(address), config, folder) for address in rows]
    captions = {address: (caption,) if caption else () for address, caption in rows.items()}
    return RemoteFiles(items, captions)


def read_table(config: DatasetConfig, report: Problems) -> list[tuple[str, str]]:
    """(address, caption) of every row."""
    path = Path(config.csv_file or "")
    where = f"{config.id}.csv_file"
    address = config.csv_url_column
    caption = config.csv_caption_column or ""
    try:
        # Spreadsheets write a byte order mark; `newline=""` keeps line breaks inside quoted
        # captions.
        text = io.StringIO(read_file(path, LARGEST_PICTURE).decode("utf-8-sig"), newline="")
        table = csv.DictReader(text)
        missing = Problems()
        named = {"csv_url_column": address, "csv_caption_column": caption}
        check_columns(named, list(table.fieldnames or ()), config.id, missing)
        report.extend(missing)
        if missing:
            return []
        return [((row[address] or "").strip(), (row[caption] or "").strip()) for row in table]
    except MediaError as error:
        report.error(where, f"{str(path)!r} {error}.")
    except (UnicodeDecodeError, csv.Error) as error:
        report.error(where, f"{str(path)!r} is not a table in UTF-8: {error}.")
    return []


def name_of(address: str) -> str:
    """The path in the store, without a suffix: a hash of the address, in 256 subfolders."""
    digest = hash_text(address)
    return f"{digest[:2]}/{digest[:32]}"


def web_item(address: str, name: str, config: DatasetConfig, base: Path) -> Item:
    """The file at an address, or at a path relative to `base`."""
    scheme = SCHEME.match(address)
    if scheme is None:
        path = base / address
        folders = () if config.allow_private_urls else (base,)
        return Item(address, name, partial(copy_file, path, folders), _version(path))
    if scheme[1].lower() not in ("http", "https"):
        # Still an item, so that the plan lists the row with the reason.
        return Item(address, name, partial(_refuse, scheme[1]))
    most = WEB_CLIP if config.holds_clips else WEB_PICTURE
    return Item(
        address, name, partial(read_url, address, most, allow_private=config.allow_private_urls)
    )


def _version(path: Path) -> str:
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: NUL in the name
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}"


def copy_file(path: Path, folders: Sequence[Path]) -> Iterator[bytes]:
    """Read a local file in chunks.

    Args:
        folders: the file must be below one of them, since the table may come from anybody. Links
            below them may lead anywhere, since only local users can create them. Empty allows all
            paths.

    Raises:
        DownloadError: the file is not below the folders, or cannot be read.
    """
    # `abspath` does not resolve links.
    named = Path(os.path.abspath(path))  # noqa: PTH100
    roots = [os.path.abspath(folder) for folder in folders]  # noqa: PTH100
    if roots and not any(named.is_relative_to(root) for root in roots):
        raise DownloadError(
            "is outside of the folder of its table; set allow_private_urls to accept such files"
        )
    try:
        check_regular(path, LARGEST_CLIP)
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (MediaError, OSError) as error:
        raise DownloadError(str(error)) from error


def _refuse(scheme: str) -> Iterator[bytes]:
    raise DownloadError(f"uses {scheme}; only http and https are supported")
