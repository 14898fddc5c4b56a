"""Measures of the source: `python -m tests.house [FOLDER]` prints them.

Code lines are lines with code on them: no blank ones, no comments, no docstrings.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "simpletuner"
QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
Function = ast.FunctionDef | ast.AsyncFunctionDef
SHORT_FILE = 40


@dataclass(frozen=True)
class File:
    """One module, read."""

    path: Path
    tree: ast.Module
    lines: frozenset[int]

    def length(self, node: ast.stmt) -> int:
        """Code lines of a definition, decorators aside."""
        return len(self.lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))

    def definitions(self) -> Iterator[tuple[str, ast.stmt, bool]]:
        """Functions and classes with their dotted names, and whether every part of the name is public; what stands
        inside a function is part of it."""
        yield from _definitions(self.tree, "", True)


def _definitions(node: ast.Module | ast.ClassDef, prefix: str, public: bool) -> Iterator[tuple[str, ast.stmt, bool]]:
    for each in node.body:
        if isinstance(each, Function | ast.ClassDef):
            name, shown = prefix + each.name, public and not each.name.startswith("_")
            yield name, each, shown
            if isinstance(each, ast.ClassDef):
                yield from _definitions(each, f"{name}.", shown)


def read(path: Path) -> File:
    """Parse a module and find its lines of code."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in QUIET:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return File(path, tree, frozenset(lines))


@dataclass(frozen=True)
class House:
    """All modules of a package."""

    files: list[File]

    @classmethod
    def at(cls, folder: Path) -> House:
        """All modules below a folder."""
        return cls([read(path) for path in sorted(folder.rglob("*.py"))])

    def sizes(self, *kinds: type[ast.stmt]) -> dict[str, int]:
        """Code lines of all definitions of some kinds."""
        return {
            f"{file.path.stem}.{name}": file.length(node)
            for file in self.files
            for name, node, _ in file.definitions()
            if isinstance(node, kinds)
        }

    def file_sizes(self) -> dict[str, int]:
        """Code lines of all files that have any; an empty `__init__` is none."""
        return {str(file.path): len(file.lines) for file in self.files if file.lines}

    def repeated_names(self) -> dict[str, list[str]]:
        """Public functions and classes of modules whose name more than one module defines."""
        homes: dict[str, list[str]] = defaultdict(list)
        for file in self.files:
            for name, _, public in file.definitions():
                if public and "." not in name:
                    homes[name].append(str(file.path))
        return {name: paths for name, paths in sorted(homes.items()) if len(paths) > 1}

    def undocumented(self) -> list[str]:
        """Modules, and public classes and functions of modules, without a docstring; where the body is a line or two,
        the name says it."""
        found = [str(file.path) for file in self.files if file.lines and not ast.get_docstring(file.tree)]
        for file in self.files:
            for name, node, public in file.definitions():
                bare = isinstance(node, Function | ast.ClassDef) and not ast.get_docstring(node)
                if public and bare and "." not in name and file.length(node) > 3:
                    found.append(f"{file.path}: {name}")
        return found


def table(house: House) -> list[tuple[str, object]]:
    """What the bounds are about."""
    functions = sorted(house.sizes(ast.FunctionDef, ast.AsyncFunctionDef).values())
    classes, files = house.sizes(ast.ClassDef), house.file_sizes()
    return [
        ("files with code", len(files)),
        ("code lines", sum(files.values())),
        ("code lines per file, mean", round(sum(files.values()) / len(files))),
        ("largest file", max(files.values())),
        (f"files under {SHORT_FILE} code lines", sum(size < SHORT_FILE for size in files.values())),
        ("functions", len(functions)),
        ("function: median", statistics.median(functions)),
        ("function: 90th percentile", functions[len(functions) * 9 // 10]),
        ("function: longest", functions[-1]),
        ("classes", len(classes)),
        ("largest class", max(classes.values())),
        ("repeated public names", len(house.repeated_names())),
        ("without a docstring", len(house.undocumented())),
    ]


if __name__ == "__main__":
    for title, value in table(House.at(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)):
        print(f"{title:32}{value!s:>8}")
