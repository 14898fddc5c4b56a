"""Captions and file names from a parquet table."""

from __future__ import annotations

import importlib
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from simpletuner.config.datasets import ParquetConfig
from simpletuner.errors import Problem, did_you_mean


def read_table(config: ParquetConfig, where: str, problems: list[Problem]) -> dict[str, tuple[str, ...]]:
    """Captions by file name (composed Unicode, path with `/`); an empty tuple where the table has none.

    Args:
        config: path and columns.
        where: names the dataset in problems.
        problems: receives a missing package, file or column.
    """
    parquet = _pyarrow(where, problems)
    path = Path(config.path)
    if not path.is_file():
        problems.append(Problem(f"{where}.parquet.path", f"the file {config.path!r} does not exist."))
        return {}
    if parquet is None or not _has_columns(parquet, path, config, where, problems):
        return {}
    columns = [config.filename_column, config.caption_column]
    if config.fallback_caption_column:
        columns.append(config.fallback_caption_column)
    rows = parquet.read_table(path, columns=list(dict.fromkeys(columns))).to_pylist()
    return {_name(row, config): _captions(row, config) for row in rows if row[config.filename_column]}


def match_rows(
    table: Mapping[str, tuple[str, ...]], pictures: Iterable[str]
) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Captions by picture, and the names in the table that no picture has.

    A table names a picture by its path below the dataset's folder or, where that is not found, by its bare name.
    """
    matched, unused = {}, set(table)
    for picture in pictures:
        path = unicodedata.normalize("NFC", picture)
        name = path if path in table else PurePosixPath(path).name
        if name in table:
            matched[picture] = table[name]
            unused.discard(name)
    return matched, sorted(unused)


def _pyarrow(where: str, problems: list[Problem]) -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError:
        message = "parquet needs the package pyarrow: pip install 'simpletuner[parquet]'."
        problems.append(Problem(f"{where}.metadata_backend", message))
        return None


def _has_columns(parquet: Any, path: Path, config: ParquetConfig, where: str, problems: list[Problem]) -> bool:
    """Check every column that the entry names, also those of sizes, which pictures themselves decide."""
    try:
        known = list(parquet.read_schema(path).names)
    except (OSError, ValueError) as error:  # pyarrow's own errors are both
        problems.append(Problem(f"{where}.parquet.path", f"{str(path)!r} is not a parquet file: {error}."))
        return False
    named = {key: value for key, value in config.model_dump().items() if key.endswith("_column") and value}
    missing = {key: value for key, value in named.items() if value not in known}
    for key, value in missing.items():
        message = f"there is no column {value!r}; the table has: {', '.join(known)}.{did_you_mean(value, known)}"
        problems.append(Problem(f"{where}.parquet.{key}", message))
    return not missing


def _name(row: dict[str, Any], config: ParquetConfig) -> str:
    name = str(row[config.filename_column]).replace("\\", "/")
    if not config.identifier_includes_extension:
        name += ".png"
    return unicodedata.normalize("NFC", str(PurePosixPath(name)))


def _captions(row: dict[str, Any], config: ParquetConfig) -> tuple[str, ...]:
    for column in (config.caption_column, config.fallback_caption_column):
        value = row[column] if column else None
        texts = value if isinstance(value, list) else [value]
        captions = tuple(str(text).strip() for text in texts if text is not None and str(text).strip())
        if captions:
            return captions
    return ()
