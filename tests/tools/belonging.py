"""Which tests belong to a fault, and which of them notice it soonest.

A test is likely to notice a fault if it imports the module, lies in its room or in that of an
importer, and shares rare words with the line and the function that encloses it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.tools.faults import Fault

# They need a GPU, or test texts and pictures of pages.
LEFT_OUT = ("gpu", "docs")
# Points of a file of tests; without any, its tests are not run, unless their words are closest.
OWN_FILE = 6
IMPORTS = 4
SAME_ROOM = 2
OF_AN_IMPORTER = 2
MOST_POINTS = 12
CLOSEST = 30  # tests that are run for their words alone
LINE_WEIGHT = 4.0  # of a word in the line or in the names, compared with one in the function
QUICK = 0.3  # about the seconds of a quick test
SLOW = re.compile(r"mark\.slow(?:\(([\d.]+)\))?")


@dataclass(frozen=True)
class Source:
    """A Python file: what it imports, and every word in it."""

    path: Path  # below the root
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> frozenset[str]:
        """The imported modules, and `module.name` for every imported name."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module)
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
        return frozenset(found)

    def part(self, definition: ast.FunctionDef | ast.ClassDef) -> str:
        """The text of a class or function, with its decorators."""
        beginnings = [definition, *definition.decorator_list]
        first = min(part.lineno for part in beginnings)
        return "\n".join(self.text.splitlines()[first - 1 : definition.end_lineno])


@dataclass(frozen=True)
class TestFunction:
    """One test, with all its cases.

    Attributes:
        name: as pytest names it, without cases.
        seconds: about how long it takes.
    """

    __test__ = False  # pytest looks for classes with this beginning

    name: str
    file: Source
    words: frozenset[str]
    seconds: float


def words_of(text: str) -> frozenset[str]:
    """Identifiers, and the words of which they consist."""
    whole = set(re.findall(r"[A-Za-z_]\w+", text))
    parts = {part for word in whole for part in word.lower().split("_")}
    return frozenset(whole | {part for part in parts if len(part) > 2})


@dataclass
class Suite:
    """The program and the tests of a tree.

    Attributes:
        left_out: tests that fail anyway, with or without their cases.
    """

    root: Path
    left_out: Collection[str] = ()
    program: dict[str, Source] = field(default_factory=dict)
    tests: list[TestFunction] = field(default_factory=list)

    def __post_init__(self) -> None:
        for source in self._sources("simpletuner"):
            self.program[source.path.as_posix()] = source
        for source in self._sources("tests"):
            is_test = source.path.name.startswith("test_")
            if is_test and source.path.parts[1] not in LEFT_OUT:
                self.tests += tests_in(source)
        red = {name.partition("[")[0] for name in self.left_out}
        self.tests = [test for test in self.tests if test.name not in red]

    def _sources(self, part: str) -> Iterator[Source]:
        for path in sorted((self.root / part).rglob("*.py")):
            yield Source(path.relative_to(self.root), path.read_text(encoding="utf-8"))

    @cached_property
    def rarity(self) -> dict[str, float]:
        """One over the number of tests that have a word."""
        counts = Counter(word for test in self.tests for word in test.words)
        return {word: 1 / count for word, count in counts.items()}

    def importers(self, module: str) -> list[Path]:
        """The files of the core that import a module."""
        return [
            source.path
            for source in self.program.values()
            if source.path.parts[1] not in ("annexes", "cli") and module in source.imports
        ]

    def belonging(self, fault: Fault, seconds: float) -> list[TestFunction]:
        """Tests of about these seconds in all, the most telling for their time first."""
        scores = self._scores(fault)
        order = sorted(scores, key=lambda test: -scores[test] / (QUICK + test.seconds))
        chosen = []
        for test in order:
            seconds -= QUICK + test.seconds
            if seconds < 0:
                break
            chosen.append(test)
        return chosen

    def _scores(self, fault: Fault) -> dict[TestFunction, float]:
        path = Path(fault.path)
        module = fault.path.removesuffix(".py").replace("/", ".")
        neighbours = {own_tests(importer) for importer in self.importers(module)}
        points = {
            test.file.path: points_of(test.file, path, module, neighbours) for test in self.tests
        }
        near = self._nearness(fault)
        most = max(near.values(), default=0) or 1.0
        closest = {*sorted(near, key=lambda test: -near[test])[:CLOSEST]}
        return {
            test: near[test] / most + points[test.file.path] / MOST_POINTS
            for test in self.tests
            if points[test.file.path] or test in closest
        }

    def _nearness(self, fault: Fault) -> dict[TestFunction, float]:
        """The rarity of the words that a test shares with a fault."""
        source = self.program[fault.path]
        line = source.text.splitlines()[fault.line - 1]
        close = words_of(" ".join([line, *fault.names]))
        around = words_of(enclosing(source, fault.line))
        near = {}
        for test in self.tests:
            shared = sum(self.rarity[word] for word in around & test.words)
            shared += LINE_WEIGHT * sum(self.rarity[word] for word in close & test.words)
            near[test] = shared
        return near


def tests_in(source: Source) -> Iterator[TestFunction]:
    """The tests of a file."""
    marks = [part for part in source.text.splitlines() if part.startswith("pytestmark")]
    for holder, prefix in test_holders(source):
        for node in holder.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = source.part(node)
                decorators = text.partition("def test_")[0]
                slow = SLOW.search("\n".join([decorators, *marks]))
                seconds = float(slow[1] or 2) if slow else 0.0
                name = f"{source.path.as_posix()}::{prefix}{node.name}"
                yield TestFunction(name, source, words_of(text), seconds)


def test_holders(source: Source) -> Iterator[tuple[ast.Module | ast.ClassDef, str]]:
    """The module and its classes of tests, with the beginning of the names of their tests."""
    yield source.tree, ""
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield node, f"{node.name}::"


def enclosing(source: Source, line: int) -> str:
    """The text of the innermost class or function around a line."""
    around = [
        node
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    innermost = max(around, key=lambda node: node.lineno, default=None)
    return "" if innermost is None else source.part(innermost)


def points_of(
    test: Source, path: Path, module: str, neighbours: Iterable[tuple[str, str]]
) -> float:
    """How close a file of tests is to a file of the program."""
    room = test.path.parts[1] if len(test.path.parts) > 2 else ""
    own = own_tests(path)
    points = 0.0
    if (room, test.path.name) == own:
        points += OWN_FILE
    if room and room == own[0]:
        points += SAME_ROOM
    if module in test.imports:
        points += IMPORTS
    if (room, test.path.name) in neighbours:
        points += OF_AN_IMPORTER
    return points


def own_tests(path: Path) -> tuple[str, str]:
    """The folder and the name that the tests of a file of the program have, if it has its own."""
    room = path.parts[1] if len(path.parts) > 2 else ""
    return room, f"test_{path.stem.lstrip('_')}.py"
