"""The source stays pleasant to read: bounds a little above what it is, so that it cannot grow unnoticed.

The figures are those of programs that are pleasant to read (torchtitan, nanochat, torchtune, litgpt, httpx): functions
of 8 to 13 code lines at the median and 30 at the 90th percentile, files of 130 to 250 lines. Functions here are
shorter; so are files, which must not fall apart into more and smaller ones.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

from tests.house import PACKAGE, SHORT_FILE, House, read

TABLES = {"schema.py"}  # one option after the other, looked up and not read through


@pytest.fixture(scope="module")
def house() -> House:
    return House.at(PACKAGE)


def above(sizes: dict[str, int], bound: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > bound}


def test_functions_are_short(house: House) -> None:
    sizes = house.sizes(ast.FunctionDef, ast.AsyncFunctionDef)
    assert above(sizes, 50) == {}
    assert statistics.median(sizes.values()) <= 6
    assert sorted(sizes.values())[len(sizes) * 9 // 10] <= 15


def test_classes_and_files_are_neither_large_nor_crumbs(house: House) -> None:
    assert above(house.sizes(ast.ClassDef), 154) == {}
    sizes = house.file_sizes()
    assert above({name: size for name, size in sizes.items() if Path(name).name not in TABLES}, 350) == {}
    assert sum(size < SHORT_FILE for size in sizes.values()) <= 30
    assert statistics.mean(sizes.values()) >= 92


def test_a_name_means_one_thing(house: House) -> None:
    """Families answer the same questions by the same names; beside those, few names are used twice."""
    repeated = {
        name: homes
        for name, homes in house.repeated_names().items()
        if len({Path(home).name for home in homes}) == len(homes)
    }
    assert len(repeated) <= 16, repeated


def test_everything_public_says_what_it_is_for(house: House) -> None:
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
