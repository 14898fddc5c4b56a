"""Keys that the program writes out exist: a misspelled one would have no effect, or no field."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import simpletuner
from simpletuner.config.datasets import OPTIONS, VideoConfig
from simpletuner.config.option import Option, When
from simpletuner.config.schema import all_options
from simpletuner.models.registry import FAMILIES

PACKAGE = Path(simpletuner.__file__).parent
REPORTS = ("error", "warn", "no_effect")
# Not keys of config.json or of a dataset, but what a problem is about.
OTHERS = {
    "CONFIG_BACKEND",
    "SIMPLETUNER_LOG_LEVEL",
    "",  # the file, or the key inside of which something is read
    "composite_image_config.select_index",
    "config",
    "device",
    "disk",
    "example",
    "key",
    "parquet.path",
    "prompts",
}
KNOWN = {*all_options(), *OPTIONS, *VideoConfig.model_fields, *OTHERS}


def keys_in(source: str) -> Iterator[tuple[int, str]]:
    """(line, key) of every problem whose key is written out."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(attr=method), args=[ast.Constant(value=str(key)), _, *_]
            ) if method in REPORTS:
                yield node.lineno, key
            case ast.Call(func=ast.Name(id="Problem"), args=[ast.Constant(value=str(key)), _, *_]):
                yield node.lineno, key
            case ast.Assign(
                targets=[ast.Name(id="key" | "KEY")], value=ast.Constant(value=str(key))
            ):
                yield node.lineno, key


def test_a_problem_is_reported_under_a_key_that_exists() -> None:
    unknown = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        if room in ("annexes", "cli"):  # they report what their own forms and commands take
            continue
        for line, key in keys_in(path.read_text(encoding="utf-8")):
            if key not in KNOWN and key.partition(".")[0] not in KNOWN:
                unknown.append(f"{path.relative_to(PACKAGE)}:{line}: {key}")

    assert unknown == []


def keys_of(condition: When | None) -> Iterator[str]:
    """The keys on which a condition depends."""
    while condition is not None:
        yield from condition.keys
        condition = condition.also


@pytest.mark.parametrize("options", [all_options(), OPTIONS], ids=["config", "datasets"])
def test_conditions_of_options_depend_on_keys_that_exist(options: Mapping[str, Option]) -> None:
    named = {
        f"{name}: {key}"
        for name, option in options.items()
        for condition in (*option.requires, *option.excludes)
        for key in keys_of(condition)
        if key not in all_options() and key not in OPTIONS
    }

    assert named == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_defaults_for_keys_that_exist(family: str) -> None:
    spec = FAMILIES[family]
    flavours = [key for flavour in spec.flavours for key in flavour.defaults]

    assert {*spec.defaults, *flavours} <= {*all_options()}
