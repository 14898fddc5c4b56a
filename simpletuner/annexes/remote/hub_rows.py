"""Lists datasets of type huggingface: rows of a dataset on the hub, or of a folder like it.

The package `datasets` downloads and reads the tables; media are stored undecoded.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from simpletuner.annexes.remote.store import DownloadError, Item, RemoteFiles, Store, UnfetchedError
from simpletuner.annexes.remote.web_table import SCHEME, copy_file, web_item
from simpletuner.atomic import write_json
from simpletuner.config.datasets import DatasetConfig
from simpletuner.config.json_reader import read_stored
from simpletuner.config.option import Package, check_installed
from simpletuner.config.paths import home_path
from simpletuner.config.remote import CompositeImage, HubKeys, RowFilter
from simpletuner.data.caption_tables import check_columns, first_texts, texts_in
from simpletuner.data.files import MediaError
from simpletuner.data.pictures import decode
from simpletuner.errors import Problems, UserError
from simpletuner.hashing import hash_text
from simpletuner.weights.hub import hub_fault

DATASETS = Package("datasets", "datasets>=4,<6")
SAVED = "rows.json"


@dataclass(frozen=True)
class Rows:
    """The result of reading all columns except the media.

    Attributes:
        identity: a hash of the dataset's commit and the keys that select rows.
        captions: captions of the used rows, by number.
        left_out: reasons why the other rows are not used, by number.
    """

    identity: str
    captions: Mapping[int, tuple[str, ...]]
    left_out: Mapping[int, str]


def list_rows(config: DatasetConfig, store: Store, report: Problems) -> RemoteFiles:
    """The rows that pass `filter_func`; the dataset is loaded only if files are missing.

    Raises:
        UserError: the dataset does not exist, or access is denied.
        UnfetchedError: the dataset is not downloaded, and the hub must not be contacted.
    """
    missing = Problems()
    check_installed(DATASETS, f"{config.id}.type", "huggingface", missing)
    report.extend(missing)
    if missing:
        return RemoteFiles([])

    commit = _commit(config, asks=store.fetches)
    identity = _digest(commit, config.model_dump(include=set(HubKeys.model_fields), mode="json"))
    saved = read_stored(store.root / SAVED, Rows)
    if saved is not None and saved.identity == identity:
        # The table is needed only to read media, and not if all files are downloaded.
        files = _files_of(saved, config, commit, None)
        if not (store.fetches and store.missing(files.items)):
            return files
    if not store.fetches:
        raise UnfetchedError("its rows are")
    table = _load(config, commit, store.root)
    facts = _facts(table, config)
    missing = Problems()
    _check_table(table, facts, config, missing)
    report.extend(missing)
    if missing:
        return RemoteFiles([])
    facts_of_rows: Iterable[dict[str, Any]] = facts
    if not _columns(config):
        # A `datasets` table without columns has no rows, so empty rows stand for them.
        facts_of_rows = ({} for _ in range(len(table)))
    rows = _choose(facts_of_rows, config, identity)
    write_json(store.root / SAVED, asdict(rows))
    return _files_of(rows, config, commit, table)


def _digest(*values: object) -> str:
    """A short hash of JSON values."""
    return hash_text(json.dumps(values))[:16]


def _commit(config: DatasetConfig, *, asks: bool) -> str:
    """The commit of the dataset's revision; for a folder, a digest of its files.

    Args:
        asks: contact the hub; otherwise the commit is that in the cache.

    Raises:
        UserError: the dataset is gated, private or missing, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name = config.dataset_name or ""
    folder = home_path(name)
    if folder.is_dir():
        files = [(str(path), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
        return _digest([(path, status.st_size, status.st_mtime_ns) for path, status in files])
    try:
        # Downloading one small file resolves a revision to its commit, also from the cache.
        snapshot = snapshot_download(
            name,
            repo_type="dataset",
            revision=config.revision,
            allow_patterns="README.md",
            local_files_only=not asks,
        )
        return Path(snapshot).name
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        if not asks:
            raise UnfetchedError("its rows are") from error
        raise UserError(_refusal(name, error)) from error


def _refusal(name: str, error: Exception) -> str:
    """Why a dataset cannot be loaded; the hub does not reveal whether a private dataset exists."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    # `datasets` wraps the hub's errors, so the text is checked too.
    is_refused = isinstance(error, GatedRepoError | RepositoryNotFoundError)
    if is_refused or "gated" in str(error).lower():
        return (
            f"the hub has no dataset {name!r}, or it is private or gated: log in with `hf auth "
            f"login`, and accept its terms on https://huggingface.co/datasets/{name}."
        )
    if "scripts are no longer supported" in str(error):
        return (
            f"{name!r} needs a loading script, which is not supported; use a copy with "
            "parquet files."
        )
    return f"{name!r} cannot be loaded: {hub_fault(error)}."


def _load(config: DatasetConfig, commit: str, cache: Path) -> Any:
    """Load the table, with media undecoded.

    Raises:
        UserError: the dataset cannot be loaded.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    name = str(config.dataset_name)
    processes = min(config.num_proc, os.cpu_count() or 1)
    folder = home_path(name)
    source = {"path": str(folder)}
    if not folder.is_dir():
        # The commit instead of the branch, which may have moved since.
        source = {"path": name, "revision": commit}
    try:
        table = datasets.load_dataset(
            **source,
            split=config.split,
            num_proc=processes if processes > 1 else None,
            cache_dir=str(cache / "datasets"),
        )
    except (DatasetsError, OSError, RuntimeError, ValueError) as error:
        raise UserError(_refusal(name, error)) from error
    for column, feature in table.features.items():
        if isinstance(feature, datasets.Image | datasets.Video):
            # Files are kept as published: decoding would lose EXIF data, and needs torchcodec for
            # clips.
            table = table.cast_column(column, type(feature)(decode=False))
    return table


def _media(config: DatasetConfig) -> tuple[str, str]:
    """The key that names the media column, and the column."""
    if config.holds_clips:
        return "video_column", config.video_column
    return "image_column", config.image_column


def _facts(table: Any, config: DatasetConfig) -> Any:
    """The columns except the media: iterating over full rows would read every picture."""
    named = {column.partition(".")[0] for _, column in _columns(config)}
    present = named & {*table.column_names}
    # A struct becomes columns such as `quality.aesthetic`.
    return table.select_columns(sorted(present)).flatten()


def _check_table(table: Any, facts: Any, config: DatasetConfig, report: Problems) -> None:
    """Problems with columns that keys name but the table does not have."""
    columns = [*table.column_names, *(name for name in facts.column_names if "." in name)]
    for key, column in [*_columns(config), _media(config)]:
        check_columns({key: column}, columns, config.id, report, "dataset")


def _choose(rows: Iterable[dict[str, Any]], config: DatasetConfig, identity: str) -> Rows:
    """Filter rows and collect captions, without reading media."""
    captions: dict[int, tuple[str, ...]] = {}
    left_out: dict[int, str] = {}
    fallbacks = [*filter(None, (config.fallback_caption_column, config.description_column))]
    for number, row in enumerate(rows):
        reason = None
        if config.filter_func:
            reason = _why_left_out(row, config, config.filter_func)
        if reason is not None:
            left_out[number] = reason
            continue
        # From all caption columns, or else from the first fallback column that has any.
        texts: list[str] = []
        for column in config.caption_column:
            texts += texts_in(row.get(column))
        captions[number] = tuple(texts) or first_texts(row, *fallbacks)
    return Rows(identity, captions, left_out)


def _columns(config: DatasetConfig) -> list[tuple[str, str]]:
    """The columns to read except the media, with the keys that name them."""
    fixed = ("fallback_caption_column", "description_column", "num_frames_column", "fps_column")
    columns = [(key, getattr(config, key)) for key in fixed if getattr(config, key)]
    if config.caption_strategy == "huggingface" and not config.only_instance_prompt:
        columns += [("caption_column", column) for column in config.caption_column]
    rule = config.filter_func or RowFilter()
    if rule.collection:
        columns.append(("filter_func", "collection"))
    if rule.min_width:
        columns.append(("width_column", config.width_column))
    if rule.min_height:
        columns.append(("height_column", config.height_column))
    for metric in rule.quality_thresholds or ():
        columns.append(("filter_func", f"{rule.quality_column}.{metric}"))
    return columns


def _why_left_out(row: Mapping[str, Any], config: DatasetConfig, rule: RowFilter) -> str | None:
    """Why `filter_func` excludes a row; None if it does not."""
    if rule.collection and row["collection"] not in rule.collection:
        return f"collection is {row['collection']!r}"
    minimums: dict[str, float | None] = {
        config.width_column: rule.min_width,
        config.height_column: rule.min_height,
    }
    for metric, threshold in (rule.quality_thresholds or {}).items():
        minimums[f"{rule.quality_column}.{metric}"] = threshold
    for column, bound in minimums.items():
        # An unknown value fails the check.
        if bound and (row[column] is None or row[column] < bound):
            return f"{column} is {row[column]}, below {bound:g}"
    return None


def _files_of(rows: Rows, config: DatasetConfig, commit: str, table: Any) -> RemoteFiles:
    """The media of the used rows.

    Args:
        table: the loaded dataset; None if no file will be read.
    """
    _, column = _media(config)
    cut = config.composite_image_config
    # Hashes what determines a row's file, so that changed captions or filters do not download it
    # again.
    version = _digest(commit, column, cut.model_dump() if cut else None)
    source = f"{config.dataset_name}@{commit}, split {config.split}, row"
    items = []
    captions = {}
    for number, texts in rows.captions.items():
        key = f"{source} {number}"
        read = partial(_read, table, column, config, number)
        items.append(Item(key, str(number), read, version))
        captions[key] = texts
    ignored = {}
    for number, reason in rows.left_out.items():
        ignored[f"{source} {number}"] = ("not chosen", f"is left out by filter_func: {reason}")
    return RemoteFiles(items, captions, ignored)


def _read(table: Any, column: str, config: DatasetConfig, number: int) -> Iterable[bytes]:
    """Read the media of a row: bytes, a file of the dataset, or an address."""
    chunks = _chunks(table[number][column], config)
    cut = config.composite_image_config
    if cut is None or not cut.enabled:
        return chunks
    return [_cut(b"".join(chunks), cut)]


def _chunks(cell: Any, config: DatasetConfig) -> Iterable[bytes]:
    """The content of a cell of the media column in chunks.

    Raises:
        DownloadError: it has none, or it cannot be read.
    """
    if isinstance(cell, str) and SCHEME.match(cell):
        return web_item(cell, "", config, Path()).read()
    if isinstance(cell, bytes):
        return [cell]
    # A table contains files, or paths to files beside it.
    if isinstance(cell, dict) and cell.get("bytes"):
        return [cell["bytes"]]
    if isinstance(cell, dict) and cell.get("path"):
        return copy_file(Path(cell["path"]), _folders(config))
    raise DownloadError("contains neither a file nor an http(s) address")


def _folders(config: DatasetConfig) -> Sequence[Path]:
    """The folders that may contain a dataset's files; all if empty.

    They are a local dataset's folder, or for the hub, the download caches of the libraries.
    """
    import datasets
    from huggingface_hub.constants import HF_HUB_CACHE

    if config.allow_private_urls:
        return ()
    folder = home_path(config.dataset_name or "")
    if folder.is_dir():
        return (folder,)
    downloads = (config.instance_data_dir or "", HF_HUB_CACHE, datasets.config.HF_DATASETS_CACHE)
    return tuple(map(Path, downloads))


def _cut(data: bytes, cut: CompositeImage) -> bytes:
    """Cut one picture out of a row of pictures of equal width; returns a PNG."""
    try:
        picture = decode(data)
    except MediaError as error:
        raise DownloadError(str(error)) from error
    # Rounded so that the right edge of a part is the left edge of the next.
    left = picture.width * cut.select_index // cut.image_count
    right = picture.width * (cut.select_index + 1) // cut.image_count
    file = io.BytesIO()
    picture.crop((left, 0, right, picture.height)).save(file, "PNG")
    return file.getvalue()
