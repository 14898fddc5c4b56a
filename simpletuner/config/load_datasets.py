"""Read the dataset file into `DatasetConfig` objects, all problems at once.

References between entries (ids, default text cache, partners) are checked here; what needs the disk is checked
by `data/`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simpletuner.errors import Problem, did_you_mean

from .datasets import DatasetConfig, ParquetConfig, VideoConfig
from .json_files import json_kind, read_json, same_value
from .load import build_group, expand_environment
from .locate import resolve_alias
from .messages import unknown_key
from .option import parse_flag

PLACEHOLDER = re.compile(r"\{(model_family|output_dir|id)\}")
LONGEST_ID = 100
PATH_KEYS = ("cache_dir", "cache_dir_vae", "instance_data_dir", "csv_file", "csv_cache_dir")


def read_datasets(path: Path, problems: list[Problem], *, placeholders: dict[str, str]) -> list[DatasetConfig]:
    """The enabled entries of a dataset file.

    Args:
        path: the file.
        problems: receives everything that is wrong.
        placeholders: values for `{model_family}` and `{output_dir}` in paths.
    """
    if not path.is_file():
        problems.append(Problem("data_backend_config", f"the dataset file {str(path)!r} does not exist."))
        return []
    known = len(problems)
    content = read_json(path, problems)
    if not isinstance(content, list):
        if not any(problem.fatal for problem in problems[known:]):
            problems.append(Problem(str(path), f"must hold a JSON list of datasets, not {json_kind(content)}."))
        return []
    if not content:
        problems.append(Problem(str(path), "holds no datasets."))
        return []
    entries = [_read_entry(entry, index, path, problems, placeholders) for index, entry in enumerate(content)]
    enabled = [entry for entry in entries if entry is not None and not entry.disabled]
    if all(entry is not None and entry.disabled for entry in entries):
        problems.append(Problem(str(path), "all datasets are disabled."))
    check_references(enabled, problems)
    return enabled


def check_references(datasets: Sequence[DatasetConfig], problems: list[Problem]) -> None:
    """Ids are unique and every reference leads somewhere."""
    counts = Counter(dataset.id for dataset in datasets)
    for name, count in counts.items():
        if count > 1:
            problems.append(Problem(name, f"is the id of {count} datasets; ids must be unique."))
    defaults = [dataset.id for dataset in datasets if dataset.is_text_embeds and dataset.default]
    if len(defaults) > 1:
        problems.append(Problem("default", f"two text_embeds entries are the default: {', '.join(defaults)}."))
    text_ids = [dataset.id for dataset in datasets if dataset.is_text_embeds]
    condition_ids = [dataset.id for dataset in datasets if dataset.is_conditioning]
    for dataset in datasets:
        _check_reference(dataset, "text_embeds", dataset.text_embeds, text_ids, problems)
        for reference in dataset.conditioning_data or []:
            _check_reference(dataset, "conditioning_data", reference, condition_ids, problems)
        _check_reference(dataset, "source_dataset_id", dataset.source_dataset_id, list(counts), problems)


def _check_reference(
    dataset: DatasetConfig, key: str, reference: str | None, known: Sequence[str], problems: list[Problem]
) -> None:
    if reference is not None and reference not in known:
        choices = ", ".join(known) or "there are none"
        message = f"{reference!r} is not the id of such an entry ({choices}).{did_you_mean(reference, known)}"
        problems.append(Problem(f"{dataset.id}.{key}", message))


def _read_entry(
    entry: Any, index: int, path: Path, problems: list[Problem], placeholders: dict[str, str]
) -> DatasetConfig | None:
    where = f"{path.name}[{index}]"
    if not isinstance(entry, dict):
        problems.append(Problem(where, f"must be an object, not {json_kind(entry)}."))
        return None
    name = entry.get("id") or entry.get("--id")
    where = f"{path.name}: {name}" if isinstance(name, str | int) and name else where
    found: list[Problem] = []
    keys = _canonical_keys(entry, DatasetConfig, where, found)
    if _is_disabled(keys):
        return DatasetConfig(id=where, disabled=True)
    problems.extend(found)
    for part, group in (("video", VideoConfig), ("parquet", ParquetConfig)):
        if isinstance(keys.get(part), dict):
            keys[part] = _canonical_keys(keys[part], group, f"{where}.{part}", problems)
    keys = {key: expand_environment(value, f"{where}.{key}", problems) for key, value in keys.items()}
    values = {**placeholders, "id": str(keys.get("id", ""))}
    for folder, key in [(keys, key) for key in PATH_KEYS] + [(keys.get("parquet"), "path")]:
        if isinstance(folder, dict) and isinstance(folder.get(key), str):
            text = PLACEHOLDER.sub(lambda match: values[match.group(1)], folder[key])
            folder[key] = resolve_alias(text)
    config = build_group(DatasetConfig, keys, problems, prefix=f"{where}.")
    if len(config.id.encode()) > LONGEST_ID:
        problems.append(
            Problem(f"{path.name}[{index}].id", f"is longer than {LONGEST_ID} bytes; folders are named so.")
        )
    return config if config.id else config.model_copy(update={"id": where})


def _is_disabled(keys: dict[str, Any]) -> bool:
    try:
        return bool(parse_flag(keys.get("disabled", False)))
    except ValueError:
        return False  # reported with the other wrong values


def _canonical_keys(entry: dict[str, Any], group: Any, where: str, problems: list[Problem]) -> dict[str, Any]:
    """Resolve aliases, drop unset values, and report unknown keys and contradictions."""
    names = {
        alias: name
        for name, field in group.model_fields.items()
        for alias in (name, *(field.json_schema_extra or {}).get("aliases", ()))
    }
    result: dict[str, Any] = {}
    for written, value in entry.items():
        key = written.removeprefix("--").replace("-", "_")
        if key not in names:
            if not key.startswith("_"):
                problems.append(Problem(f"{where}.{written}", unknown_key(key, list(names))))
            continue
        if value is None or value == "":
            continue
        name = names[key]
        if name in result and not same_value(result[name], value):
            problems.append(Problem(f"{where}.{name}", f"is given twice: {result[name]!r} and {value!r}."))
        result[name] = value
    return result
