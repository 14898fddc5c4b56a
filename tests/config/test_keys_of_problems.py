"""Problems name a key that exists: the page marks its field by that name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import simpletuner
from simpletuner.config.datasets import OPTIONS, VideoConfig
from simpletuner.config.schema import all_options

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
