"""Which tests belong to a place in the program: of its room, of its importers, with its name."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.tools.faults import Fault

# They need a GPU, or test texts and pictures of pages.
LEFT_OUT = ("gpu", "docs")
# Points of a file of tests. With ENOUGH it is run, with FIRST before all others.
OWN_FILE = 8
IMPORTS = 4
NAMES = 3
SAME_ROOM = 3
OF_AN_IMPORTER = 3
ENOUGH = 3
FIRST = 7


@dataclass(frozen=True)
class Source:
    """A Python file: what it imports, and every word in it."""

    path: Path  # below the root
    text: str

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", self.text))

    @cached_property
    def imports(self) -> frozenset[str]:
        """The imported modules, and `module.name` for every imported name."""
        found: set[str] = set()
        for node in ast.walk(ast.parse(self.text)):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return frozenset(found)


@dataclass
class Suite:
    """The files of tests of a tree, and what the program and they import."""

    root: Path
    sources: dict[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in ("simpletuner", "tests"):
            for path in sorted((self.root / part).rglob("*.py")):
                short = path.relative_to(self.root)
                self.sources[short.as_posix()] = Source(short, path.read_text(encoding="utf-8"))

    @cached_property
    def files(self) -> list[Source]:
        return [
            source
            for source in self.sources.values()
            if source.path.name.startswith("test_") and source.path.parts[1] not in LEFT_OUT
        ]

    def importers(self, module: str) -> list[Path]:
        """The files of the core that import a module."""
        return [
            source.path
            for source in self.sources.values()
            if source.path.parts[0] == "simpletuner"
            and source.path.parts[1] not in ("annexes", "cli")
            and module in source.imports
        ]

    def tiers(self, fault: Fault) -> list[list[str]]:
        """The files of tests that belong to a fault: first the closest, then the others."""
        path = Path(fault.path)
        module = fault.path.removesuffix(".py").replace("/", ".")
        names = frozenset(name for name in fault.names[-3:] if is_telling(name))
        neighbours = {own_tests(importer) for importer in self.importers(module)}
        points = {
            test.path.as_posix(): self.points(test, path, module, names, neighbours)
            for test in self.files
        }
        chosen = [name for name, score in points.items() if score >= ENOUGH]
        chosen.sort(key=lambda name: (-points[name], len(self.sources[name].text)))
        first = [name for name in chosen if points[name] >= FIRST]
        return [first, [name for name in chosen if name not in first]]

    def points(
        self,
        test: Source,
        path: Path,
        module: str,
        names: frozenset[str],
        neighbours: set[tuple[str, str]],
    ) -> int:
        """How close a file of tests is to a place."""
        room = test.path.parts[1] if len(test.path.parts) > 2 else ""
        own = own_tests(path)
        score = 0
        if (room, test.path.name) == own:
            score += OWN_FILE
        if room and room == own[0]:
            score += SAME_ROOM
        if module in test.imports:
            score += IMPORTS
        if names & test.words:
            score += NAMES
        if (room, test.path.name) in neighbours:
            score += OF_AN_IMPORTER
        return score


def own_tests(path: Path) -> tuple[str, str]:
    """The folder and the name that the tests of a file of the program have, if it has its own."""
    room = path.parts[1] if len(path.parts) > 2 else ""
    return room, f"test_{path.stem.lstrip('_')}.py"


def is_telling(name: str) -> bool:
    """Whether a name is found only where it is meant: of several words, or long."""
    return "_" in name.strip("_") or any(map(str.isupper, name[1:])) or len(name) > 10
