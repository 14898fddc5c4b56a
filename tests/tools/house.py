"""Measures of the source: `python -m tests.tools.house [--run] [--against REF]` prints them.

`--against` takes a commit or the folder of another tree, and prints what changed. `--run` trains
the packaged demo up to its first backward pass, and then to its end, and counts what was executed
on the way (executed_lines.py).

Code lines are lines with code on them: no blank ones, no comments, no docstrings (of modules,
classes, functions and attributes, as in PEP 257). The executed lines of a file are those of the
functions that were called, and those outside of functions. Complexity is radon's: one, and one for
every branch, loop, handler, comprehension with its conditions, assertion, and further operand of
`and` or `or`; functions inside of a function are judged for themselves.
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import json
import multiprocessing
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "simpletuner"
QUIET = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
Function = ast.FunctionDef | ast.AsyncFunctionDef
BRANCH = ast.If | ast.IfExp | ast.For | ast.AsyncFor | ast.While | ast.ExceptHandler | ast.Assert
# What the demo imports beside the package. It takes longer than the demo, so four of its runs are
# forks of one process.
LIBRARIES = (
    "accelerate",
    "optimi",
    "peft",
    "torch.profiler",
    "diffusers.pipelines.kandinsky5.pipeline_kandinsky_t2i",
    "transformers.models.clip.modeling_clip",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
)
LOG = "log"
REPORT = "report.json"
SHORT_FILE = 40
COMPLEX = 12


@dataclass(frozen=True)
class File:
    """One module, read.

    Attributes:
        lines: those with code.
        comments: how many there are, behind code or alone on a line.
    """

    path: Path
    tree: ast.Module
    lines: frozenset[int]
    comments: int

    def length(self, node: ast.stmt) -> int:
        """Code lines of a definition, decorators aside."""
        return len(self.lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))

    def executed(self, called: Collection[int]) -> int:
        """Code lines outside of functions, and of the functions that were called, whose first lines
        these are.
        """
        idle: set[int] = set()
        for function in outermost(self.tree):
            first = min([function, *function.decorator_list], key=lambda node: node.lineno).lineno
            lines = range(first, (function.end_lineno or first) + 1)
            if not any(line in lines for line in called):
                idle |= set(lines)
        return len(self.lines - idle)

    def definitions(self) -> Iterator[tuple[str, ast.stmt, bool]]:
        """Functions and classes with their dotted names, and whether every part of the name is
        public; what stands inside a function is part of it."""
        yield from _definitions(self.tree, "", True)


def complexity(function: ast.AST) -> int:
    """Cyclomatic complexity of the body of a function."""
    total = 1
    nodes = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        if isinstance(node, Function):
            continue
        nodes += ast.iter_child_nodes(node)
        match node:
            case ast.BoolOp(values=values):
                total += len(values) - 1
            case ast.comprehension(ifs=conditions):
                total += 1 + len(conditions)
            case ast.match_case(pattern=ast.MatchAs(pattern=None)):
                pass  # the else of its match
            case ast.match_case():
                total += 1
            case _:
                total += isinstance(node, BRANCH)
    return total


def outermost(node: ast.AST) -> Iterator[Function]:
    """The functions and methods in a module; not those inside of functions, which are parts of
    them.
    """
    for inner in ast.iter_child_nodes(node):
        yield from [inner] if isinstance(inner, Function) else outermost(inner)


def _definitions(
    node: ast.Module | ast.ClassDef, prefix: str, public: bool
) -> Iterator[tuple[str, ast.stmt, bool]]:
    for each in node.body:
        if isinstance(each, Function | ast.ClassDef):
            name = prefix + each.name
            shown = public and not each.name.startswith("_")
            yield name, each, shown
            if isinstance(each, ast.ClassDef):
                yield from _definitions(each, f"{name}.", shown)


def docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    """The strings that begin a module, a class or a function, and those below the attributes of
    classes.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            for before, statement in zip((None, *node.body), node.body, strict=False):
                follows = isinstance(node, ast.ClassDef) and isinstance(before, ast.AnnAssign)
                match statement:
                    case ast.Expr(value=ast.Constant(value=str())) if before is None or follows:
                        yield statement


def read(path: Path) -> File:
    """Parse a module and find its lines of code."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comments += token.type == tokenize.COMMENT
        if token.type not in QUIET:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for docstring in docstrings(tree):
        lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return File(path, tree, frozenset(lines), comments)


@dataclass(frozen=True)
class House:
    """All modules of a package."""

    folder: Path
    files: list[File]

    @classmethod
    def at(cls, folder: Path) -> House:
        """All modules below a folder."""
        return cls(folder, [read(path) for path in sorted(folder.rglob("*.py"))])

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

    def rooms(self) -> dict[str, int]:
        """Code lines of the core, of the command line and of each annex."""
        lines: dict[str, int] = defaultdict(int)
        for file in self.files:
            match file.path.relative_to(self.folder).parts:
                case ("annexes", annex, *_):
                    lines[f"annex {annex.removesuffix('.py')}"] += len(file.lines)
                case ("cli", *_):
                    lines["commands"] += len(file.lines)
                case _:
                    lines["core"] += len(file.lines)
        return {
            room: count
            for room, count in sorted(lines.items(), key=lambda item: item[0] != "core")
            if count
        }

    def complexities(self) -> dict[str, int]:
        """Cyclomatic complexity of all functions, those inside of others too."""
        return {
            f"{file.path.relative_to(self.folder)}:{node.lineno} {node.name}": complexity(node)
            for file in self.files
            for node in ast.walk(file.tree)
            if isinstance(node, Function)
        }

    def repeated_names(self) -> dict[str, list[str]]:
        """Public functions and classes of modules whose name more than one module defines."""
        homes: dict[str, list[str]] = defaultdict(list)
        for file in self.files:
            for name, _, public in file.definitions():
                if public and "." not in name:
                    homes[name].append(str(file.path))
        return {name: paths for name, paths in sorted(homes.items()) if len(paths) > 1}

    def undocumented(self) -> list[str]:
        """Modules, and public classes and functions of modules, without a docstring; where the body
        is a line or two, the name says it."""
        found = [
            str(file.path) for file in self.files if file.lines and not ast.get_docstring(file.tree)
        ]
        for file in self.files:
            for name, node, public in file.definitions():
                bare = isinstance(node, Function | ast.ClassDef) and not ast.get_docstring(node)
                if public and bare and "." not in name and file.length(node) > 3:
                    found.append(f"{file.path}: {name}")
        return found


def table(house: House) -> dict[str, float]:
    """What can be counted in the source, in the order in which it is printed."""
    functions = sorted(house.sizes(ast.FunctionDef, ast.AsyncFunctionDef).values())
    classes = house.sizes(ast.ClassDef)
    files = house.file_sizes()
    lines = sum(files.values())
    return {
        "files with code": len(files),
        "code lines": lines,
        **{f"  {room}": count for room, count in house.rooms().items()},
        "code lines per file, mean": round(lines / len(files)),
        "largest file": max(files.values()),
        f"files under {SHORT_FILE} code lines": sum(size < SHORT_FILE for size in files.values()),
        "functions": len(functions),
        "function: median": statistics.median(functions),
        "function: 90th percentile": functions[len(functions) * 9 // 10],
        "function: longest": functions[-1],
        f"functions of complexity > {COMPLEX}": sum(
            value > COMPLEX for value in house.complexities().values()
        ),
        "classes": len(classes),
        "largest class": max(classes.values()),
        "repeated public names": len(house.repeated_names()),
        "without a docstring": len(house.undocumented()),
        "comments per code line": round(sum(file.comments for file in house.files) / lines, 3),
    }


def train_demo(tree: Path, end: str) -> tuple[dict[Path, list[int]], dict[str, float]]:
    """What the packaged demo executes with the package of a tree: the first lines of functions by
    file, and counts.
    """
    with tempfile.TemporaryDirectory(prefix="house-") as name:
        folder = Path(name)
        process = multiprocessing.get_context("fork").Process(
            target=_train_inside, args=(folder, tree, end)
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"error: the demo did not come to its {end}:\n{(folder / LOG).read_text()}")
        told = json.loads((folder / REPORT).read_text())
        return {Path(file): lines for file, lines in told["executed"].items()}, told["counts"]


def _train_inside(folder: Path, tree: Path, end: str) -> None:
    """Run tests/tools/executed_lines.py in an empty folder, as all that this process does."""
    with (folder / LOG).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(tree))
    sys.argv[1:] = [str(tree), REPORT, end]
    runpy.run_path(str(Path(__file__).with_name("executed_lines.py")), run_name="__main__")


def measure_run(tree: Path) -> dict[str, float]:
    """What the packaged demo executes before its first backward pass, and as a whole."""
    before, counts = train_demo(tree, "backward")
    whole, _ = train_demo(tree, "end")
    rooms: dict[str, int] = defaultdict(int)
    for path, called in whole.items():
        room = path.relative_to(tree / "simpletuner").parts[0]
        rooms[{"annexes": "annexes", "cli": "commands"}.get(room, "core")] += read(path).executed(
            called
        )
    return {
        "files executed": len(before),
        "  their code lines": sum(len(read(path).lines) for path in before),
        **counts,
        **{
            f"executed to the end, {room}": lines
            for room, lines in sorted(rooms.items(), reverse=True)
        },
    }


def measure(tree: Path, run: bool) -> dict[str, float]:
    """All figures of a tree."""
    return table(House.at(tree / "simpletuner")) | (measure_run(tree) if run else {})


def print_figures(now: dict[str, float], before: dict[str, float] | None) -> None:
    """One figure a line; with those of a version before, what changed."""
    for title in now if before is None else {**now, **before}:
        value = f"{title:38}{now.get(title, 0):>8}"
        if before is not None:
            difference = round(now.get(title, 0) - before.get(title, 0), 3)
            change = f"{difference:+}" if difference else ""
            value = f"{title:38}{before.get(title, 0):>8}{now.get(title, 0):>8}{change:>8}"
        print(value)


def main() -> None:
    """Print the figures of this tree."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.house", description=__doc__)
    parser.add_argument("--against", metavar="REF", help="a commit, or the folder of a tree")
    parser.add_argument("--run", action="store_true", help="count what the demo executes, too")
    arguments = parser.parse_args()
    gc.disable()  # syntax trees have no cycles; to look for some took half of the time
    for name in LIBRARIES if arguments.run else ():
        import_module(name)
    gc.freeze()  # a run collects after each encoder, and need not look through the libraries
    now = measure(ROOT, arguments.run)
    before = None
    if arguments.against and Path(arguments.against, "simpletuner").is_dir():
        before = measure(Path(arguments.against).resolve(), arguments.run)
    elif arguments.against:
        with tempfile.TemporaryDirectory(prefix="house-") as folder:
            git = ["git", "-C", str(ROOT), "archive", arguments.against, "simpletuner"]
            archive = subprocess.run(git, stdout=subprocess.PIPE, check=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
            before = measure(Path(folder), arguments.run)
    print_figures(now, before)


if __name__ == "__main__":
    main()
