"""The source stays pleasant to read: standards for its parts.

The reader's time is the measure, so nothing bounds the number of lines: a function or a file is too
long when nobody can keep it in mind. The bounds are those of programs that are pleasant to read
(torchtitan, nanochat, torchtune, litgpt, httpx). `python -m tests.tools.house --against REF` prints
what a change did to sizes.
"""

from __future__ import annotations

import ast
import json
import os
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.tools.house import COMPLEX, PACKAGE, House, complexity, read

TABLES = {"schema.py"}  # one option after the other, looked up and not read through


@pytest.fixture(scope="module")
def house() -> House:
    return House.at(PACKAGE)


def above(sizes: dict[str, int], bound: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > bound}


def test_functions_are_short(house: House) -> None:
    sizes = house.sizes(ast.FunctionDef, ast.AsyncFunctionDef)
    assert above(sizes, 60) == {}
    assert statistics.median(sizes.values()) <= 8
    assert sorted(sizes.values())[len(sizes) * 9 // 10] <= 25


def test_few_functions_have_many_branches(house: House) -> None:
    # Some: a row of plain ifs reads better than the tricks that would save one.
    assert len(above(house.complexities(), COMPLEX)) <= 40


def test_files_are_not_large(house: House) -> None:
    sizes = {
        name: size for name, size in house.file_sizes().items() if Path(name).name not in TABLES
    }
    assert above(sizes, 500) == {}


def test_a_name_means_one_thing(house: House) -> None:
    """Families answer the same questions by the same names; beside those, few names are used
    twice.
    """
    assert len(house.repeated_names()) <= 30, house.repeated_names()


CONTRACTS = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
LAYERED = {
    contract["containers"][0]: contract for contract in CONTRACTS if contract["type"] == "layers"
}


@pytest.mark.slow(2)
@pytest.mark.parametrize("container", LAYERED)
def test_a_new_room_or_annex_needs_a_place_in_its_contract(container: str, tmp_path: Path) -> None:
    contract = LAYERED[container]
    folder = tmp_path.joinpath(*container.split("."))
    folder.mkdir(parents=True)
    (tmp_path / "simpletuner/__init__.py").touch()
    layers = " | ".join(contract["layers"]).split(" | ")
    for name in ("__init__", *layers):
        (folder / f"{name}.py").touch()
    assert check_imports(contract, tmp_path) == ""
    (folder / "newcomer.py").touch()
    assert f"{container}.newcomer" in check_imports(contract, tmp_path)


def check_imports(contract: dict[str, Any], folder: Path) -> str:
    """What import-linter says against the package in a folder; empty if the contract is kept."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in contract.items()]
    config = [
        "[tool.importlinter]",
        'root_package = "simpletuner"',
        "[[tool.importlinter.contracts]]",
        *lines,
    ]
    (folder / "pyproject.toml").write_text("\n".join(config))
    script = (
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(cache_dir=None))"
    )
    own = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode else ""


WHO_IS_IT = {"is_main", "is_leader", "rank", "size", "local_rank", "local_size", "label"}


def test_few_files_ask_which_process_they_are_in(house: House) -> None:
    """A `World` has verbs (`on_main`, `share`, `in_turn`) for what its callers would do with the
    answer.
    """
    asked = {
        str(file.path.relative_to(PACKAGE)): sum(
            isinstance(node, ast.Attribute)
            and node.attr in WHO_IS_IT
            and ast.unparse(node.value).rpartition(".")[2] in ("world", "sharers")
            for node in ast.walk(file.tree)
        )
        for file in house.files
        if file.path.parent.name != "distributed"
        and file.path.name != "sharding.py"  # shards are of ranks
    }
    assert above(asked, 2) == {}
    assert sum(asked.values()) > 9, "none would mean that they are spelt otherwise"


@pytest.mark.slow
def test_everything_public_has_a_docstring(house: House) -> None:
    assert house.undocumented() == []


SOURCE = '''"""Says."""

# why
x = (
    1,

)


def f() -> str:
    """Does.

    Long."""
    return """

"""
'''


def test_what_counts_as_a_line_of_code(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    file = read(path)
    assert sorted(file.lines) == [4, 5, 7, 10, 14, 15, 16]
    assert {name: file.length(node) for name, node, _ in file.definitions()} == {"f": 4}
    assert file.comments == 1


CALLED = """
A = 1
class Room:
    door: int
    @property
    def a(self):
        return [each
                for each in "a"]
    def b(self):
        return 1
"""


def test_lines_of_functions_that_were_called_are_executed(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(CALLED)
    outside = 3
    assert {line: read(path).executed([line]) - outside for line in (1, 5, 7, 9)} == {
        1: 0,
        5: 4,
        7: 4,
        9: 2,
    }


BRANCHES = """
def f(values):
    for value in values:
        if value and (value > 1 or value < -1):
            assert value
    def inside():
        return 1 if values else 2
    try:
        match values:
            case [1]: pass
            case _: pass
    except ValueError: pass
    return [value for value in values if value]
"""


def test_what_counts_as_complexity() -> None:
    assert complexity(ast.parse(BRANCHES).body[0]) == 1 + 1 + 3 + 1 + 1 + 1 + 2
