"""Captions from tables: parquet files, and the metadata.jsonl or metadata.csv beside pictures.

Hugging Face's `datasets` reads the latter as an imagefolder, with paths in `file_name`. The lists
of musubi-tuner have absolute paths in `image_path` or `video_path`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from simpletuner.config.datasets import ParquetConfig
from simpletuner.config.json_reader import parse_json, read_text, reported_under
from simpletuner.config.option import Package, check_installed
from simpletuner.config.paths import why_no_file
from simpletuner.data.discovery import Folder
from simpletuner.data.file_names import composed
from simpletuner.errors import Problems, counted, did_you_mean, shorten

# Keys of the object parquet that name a column.
COLUMN_KEYS = (
    "filename_column",
    "caption_column",
    "fallback_caption_column",
    "width_column",
    "height_column",
)
PYARROW = Package("pyarrow", "pyarrow>=21,<27")
NAME_COLUMN = "file_name"
PATH_COLUMNS = ("image_path", "video_path")
CAPTION_COLUMNS = ("text", "caption", "prompt")  # by precedence
MOST_LISTED = 3

Row = tuple[str, tuple[str, ...]]  # a file name with `/`, and its captions
CaptionTable = Mapping[str, tuple[str, ...]]  # by file name


def match_rows(
    rows: Iterable[Row], names: Sequence[str], where: str, report: Problems
) -> CaptionTable:
    """The captions of each picture or clip that has a row.

    A row names a file by its path below the dataset's folder, or by its bare name if that belongs
    to one file only.

    Args:
        names: all files of the dataset.
        where: the key that problems are reported under.
    """
    paths = {composed(name): name for name in names}
    by_bare_name: dict[str, list[str]] = {}
    for name in names:
        by_bare_name.setdefault(composed(PurePosixPath(name).name), []).append(name)
    matched: dict[str, tuple[str, ...]] = {}
    unused: set[str] = set()
    repeated: set[str] = set()
    ambiguous: dict[str, list[str]] = {}
    for row, captions in rows:
        candidates = [paths[row]] if row in paths else by_bare_name.get(row, [])
        if not candidates:
            unused.add(row)
        elif len(candidates) > 1:
            ambiguous[row] = candidates
        elif matched.setdefault(candidates[0], captions) != captions:
            repeated.add(row)
    _report_rows(where, sorted(unused), sorted(repeated), ambiguous, report)
    return matched


def _report_rows(
    where: str,
    unused: Sequence[str],
    repeated: Sequence[str],
    ambiguous: Mapping[str, Sequence[str]],
    report: Problems,
) -> None:
    """Report the rows of a table that belong to no file, or to no certain one."""
    if ambiguous:
        names = [f"{row} is {' and '.join(files)}" for row, files in ambiguous.items()]
        message = (
            f"{counted(len(ambiguous), 'name')} in the table could be several files: "
            f"{shorten(names, MOST_LISTED)}. Write their paths below the dataset's folder into the "
            "table."
        )
        report.error(where, message)
    if repeated:
        message = (
            f"several rows with different captions for {counted(len(repeated), 'file')}: "
            f"{shorten(repeated)}. Keep one row, or write paths below the dataset's folder into "
            "the table."
        )
        report.error(where, message)
    if unused:
        names_without_file = f"{counted(len(unused), 'name')} in the table: {shorten(unused)}"
        report.warn(where, f"no picture for {names_without_file}.")


def read_parquet(config: ParquetConfig, report: Problems) -> list[Row]:
    """The file names (NFC) and captions of a parquet table; no captions if a row has none."""
    path = Path(config.path)
    table_report = Problems()
    check_installed(PYARROW, "metadata_backend", "parquet", table_report)
    if not path.is_file():  # checked without the package, too, so that one start reports both
        table_report.error("parquet.path", f"{config.path!r} {why_no_file(path)}.")
    if not table_report:
        _check_table(path, config, table_report)
    report.extend(table_report)
    if table_report:
        return []
    from pyarrow import parquet

    caption_columns = (config.caption_column, config.fallback_caption_column)
    captions = [column for column in caption_columns if column]
    # Read only these columns: a table may hold the pictures themselves.
    columns = list(dict.fromkeys([config.filename_column, *captions]))
    rows: list[Row] = []
    for record in parquet.read_table(path, columns=columns).to_pylist():
        name = record[config.filename_column]
        if name:
            rows.append((_file_name(str(name), config), first_texts(record, *captions)))
    return rows


def _check_table(path: Path, config: ParquetConfig, report: Problems) -> None:
    """Check every column that the entry names, including the size columns, which are not read."""
    from pyarrow import parquet

    try:
        known = list(parquet.read_schema(path).names)
    except (OSError, ValueError) as error:  # base classes of pyarrow's errors
        report.error("parquet.path", f"{str(path)!r} is not a parquet file: {error}.")
        return
    columns = {key: getattr(config, key) for key in COLUMN_KEYS}
    named = {key: column for key, column in columns.items() if column}
    check_columns(named, known, "parquet", report)


def check_columns(
    named: Mapping[str, str],
    known: Sequence[str],
    where: str,
    report: Problems,
    what: str = "table",
) -> None:
    """Report the columns that keys name but the table lacks."""
    for key, column in named.items():
        if column not in known:
            message = f"there is no column {column!r}; the {what} has: {', '.join(known)}."
            report.error(f"{where}.{key}", message + did_you_mean(column, known))


def _file_name(name: str, config: ParquetConfig) -> str:
    return _normalised(name if config.identifier_includes_extension else f"{name}.png")


def _normalised(path: str) -> str:
    """A path with `/`, in NFC."""
    return composed(str(PurePosixPath(path.replace("\\", "/"))))


def first_texts(row: Mapping[str, Any], *columns: str) -> tuple[str, ...]:
    """The captions in the first non-empty column; a cell may hold a list."""
    for column in columns:
        texts = texts_in(row.get(column))
        if texts:
            return texts
    return ()


def texts_in(cell: Any) -> tuple[str, ...]:
    """The captions in a cell of a table, which may hold a list."""
    texts = cell if isinstance(cell, list) else [cell]
    return tuple(str(text).strip() for text in texts if text is not None and str(text).strip())


def read_metadata(folder: Folder, report: Problems) -> list[Row]:
    """The file names and captions of every metadata.jsonl and metadata.csv below a folder."""
    tables = folder.listing.metadata
    if not tables:
        message = (
            f"'metadata' reads metadata.jsonl or metadata.csv, and {str(folder.root)!r} contains "
            "neither."
        )
        report.error("caption_strategy", message)
    folders = [PurePosixPath(table).parent for table in tables]
    if len({*folders}) < len(folders):
        message = (
            f"a folder contains both metadata.jsonl and metadata.csv: {shorten(tables)}. Move one "
            "of them away."
        )
        report.error("caption_strategy", message)
        return []
    rows: list[Row] = []
    for table in tables:
        path = folder.root / table
        with reported_under("caption_strategy", path, report) as file_report:
            records = _read_records(path, file_report)
            rows += _captioned(records, folder, PurePosixPath(table).parent, file_report)
    return rows


def _read_records(path: Path, report: Problems) -> list[dict[str, Any]]:
    """The rows of a metadata.jsonl or metadata.csv by column."""
    text = read_text(path, report)
    if text is None:
        return []
    if path.suffix.lower() == ".csv":
        try:
            return list(csv.DictReader(io.StringIO(text, newline=""), restkey="", restval=""))
        except csv.Error as error:
            report.error("", f"is not a CSV table: {error}.")
            return []
    records: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            record = parse_json(line) if line.strip() else {}
        except ValueError as error:
            report.error("", f"line {number} {error}.")
            return []
        if not isinstance(record, dict):
            report.error("", f"line {number} is not a JSON object.")
            return []
        records.append(record)
    return records


def _captioned(
    records: Sequence[Mapping[str, Any]], folder: Folder, parent: PurePosixPath, report: Problems
) -> list[Row]:
    """The rows of a table that name a file.

    Args:
        parent: the table's folder, below the dataset's.
    """
    if not records:
        return []
    columns: dict[str, None] = {}  # in the order of the table
    for record in records:
        columns |= dict.fromkeys(record)
    for needed in ((NAME_COLUMN, *PATH_COLUMNS), CAPTION_COLUMNS):
        if columns.keys().isdisjoint(needed):
            names = ", ".join(map(str, columns))
            hint = " Columns must be separated by commas." if len(columns) == 1 else ""
            message = f"needs one of the columns {', '.join(needed)}; it has: {names}.{hint}"
            report.error("", message)
            return []
    caption_columns = [column for column in CAPTION_COLUMNS if column in columns]
    known = {composed(name) for name in folder.listing.files}
    rows: list[Row] = []
    for record in records:
        name = _file_of(record, folder.root, parent, known)
        if name is not None:
            rows.append((name, first_texts(record, *caption_columns)))
    return rows


def _file_of(
    record: Mapping[str, Any], root: Path, parent: PurePosixPath, known: Set[str]
) -> str | None:
    """The path below the dataset's folder of the file that a row names; None if it names none.

    Args:
        parent: the table's folder, below the dataset's.
        known: the files of the dataset.
    """
    for column in (NAME_COLUMN, *PATH_COLUMNS):
        name = record.get(column)
        if not isinstance(name, str) or not name:
            continue
        beside = _normalised(str(parent / _normalised(name)))
        if column == NAME_COLUMN or beside in known:
            return beside
        return _below(_normalised(name), root)
    return None


def _below(path: str, root: Path) -> str:
    """The path below the dataset's folder of a file that a table names by its full path."""
    file = Path(path).absolute()
    with suppress(ValueError):
        return file.relative_to(root.absolute()).as_posix()
    if file.exists():
        return path  # a file of another folder
    # The folder may have been moved since the table was written.
    return PurePosixPath(path).name
