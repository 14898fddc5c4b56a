"""Which paths a page may touch: those below the project and `--root`, and packaged examples. Free of torch.

Settings and datasets are looked at before anything that they name is. Only weights may lie anywhere: nothing in their
files is shown or changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from simpletuner.annexes.page.project import Project, Refusal
from simpletuner.config.datasets import PATH_KEYS, DatasetConfig
from simpletuner.config.load import Layer, canonical
from simpletuner.config.option import JSON_OR_FILE
from simpletuner.config.schema import all_options
from simpletuner.config.sources import resolve_alias
from simpletuner.config.values import parse_path
from simpletuner.errors import Problem

WEIGHTS = ("_name_or_path", "init_lora")  # ends of keys


@cache
def path_keys() -> frozenset[str]:
    """The settings that name a file or folder, weights aside."""
    paths = (each for each in all_options().values() if parse_path in each.parsers or each.form == JSON_OR_FILE)
    return frozenset(each.name for each in paths if not each.name.endswith(WEIGHTS))


def without_outside(project: Project, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The settings whose paths the page may touch, and a problem for every path that it may not."""
    kept, problems = dict[str, Any](), list[Problem]()
    for key, value in values.items():
        known = canonical(Layer("", [(key, value)]), []).items()
        found = [each for name, path in known if name in path_keys() for each in check_path(project, name, path)]
        problems += found
        kept |= {} if found else {key: value}
    return kept, problems


def check_dataset_paths(project: Project, entries: Iterable[DatasetConfig]) -> Iterator[Problem]:
    """A problem for each path of a dataset that the page may not touch."""
    for entry in entries:
        # Of the hub's datasets, `owner/name` is a path inside the project, too.
        for key in (*PATH_KEYS, "caption_filter_list", "dataset_name"):
            yield from check_path(project, f"{entry.id}.{key}", vars(entry)[key])
        if entry.parquet is not None:
            yield from check_path(project, f"{entry.id}.parquet.path", entry.parquet.path)


def check_path(project: Project, where: str, value: object) -> Iterator[Problem]:
    """A problem if a value is a path that the page may not touch; lists and objects are none."""
    if not isinstance(value, str) or value.lstrip()[:1] in ("[", "{"):
        return
    try:
        project.inside(str(resolve_alias(value)), packaged=True)
    except Refusal as refusal:
        yield Problem(where, refusal.problems[0].message)
