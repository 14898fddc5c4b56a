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
    where = f"{config.id}.csv_file"
    rows: dict[str, str] = {}
    empty: list[str] = []
    for number, (address, caption) in enumerate(table, start=1):
        if address:
            rows[address] = caption
        else:
            empty.append(str(number))
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
    url_column = config.csv_url_column
    caption_column = config.csv_caption_column or ""
    try:
        # Spreadsheets write a byte order mark.
        text = read_file(path, LARGEST_PICTURE).decode("utf-8-sig")
        # `newline=""` keeps line breaks inside quoted captions.
        table = csv.DictReader(io.StringIO(text, newline=""))
        missing = Problems()
        columns = {"csv_url_column": url_column, "csv_caption_column": caption_column}
        check_columns(columns, list(table.fieldnames or ()), config.id, missing)
        report.extend(missing)
        if missing:
            return []
        # A short row has None in its last columns.
        return [
            ((row[url_column] or "").strip(), (row[caption_column] or "").strip()) for row in table
        ]
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
    read = partial(read_url, address, most, allow_private=config.allow_private_urls)
    return Item(address, name, read)


def _version(path: Path) -> str:
    """The version of a local file; empty if there is none."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: NUL in the name
        return ""
    return f"{status.st_size}-{status.st_mtime_ns}"


def copy_file(path: Path, folders: Sequence[Path]) -> Iterator[bytes]:
    """Read a local file in chunks.

    Args:
        folders: the file must be below one of them, since anybody may have written the table. Links
            below them may lead anywhere, since only local users can create them. Empty allows all
            paths.

    Raises:
        DownloadError: the file is not below the folders, or cannot be read.
    """
    # `abspath` does not resolve links.
    absolute = Path(os.path.abspath(path))  # noqa: PTH100
    roots = [os.path.abspath(folder) for folder in folders]  # noqa: PTH100
    if roots and not any(absolute.is_relative_to(root) for root in roots):
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
    """Refuse to download an address of a scheme."""
    raise DownloadError(f"uses {scheme}; only http and https are supported")
