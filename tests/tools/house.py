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
# What the demo imports beside the package. Importing takes longer than the demo, so runs are forks
# of one process.
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
    """One parsed module.

    Attributes:
        lines: numbers of the lines with code.
        comments: how many there are, after code or alone on a line.
    """

    path: Path
    tree: ast.Module
    lines: frozenset[int]
    comments: int

    def length(self, node: ast.stmt) -> int:
        """Code lines of a definition, decorators aside."""
        return len(self.lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))

    def executed(self, called: Collection[int]) -> int:
        """Code lines outside of functions and in called ones; `called` are their first lines."""
        idle: set[int] = set()
        for function in outermost(self.tree):
            first = min([function, *function.decorator_list], key=lambda node: node.lineno).lineno
            lines = range(first, (function.end_lineno or first) + 1)
            if not any(line in lines for line in called):
                idle |= set(lines)
        return len(self.lines - idle)

    def definitions(self) -> Iterator[tuple[str, ast.stmt, bool]]:
        """Dotted name, node and visibility of functions and classes, methods included.

        Visible are those whose name has only public parts. Definitions inside a function are part
        of it.
        """
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
                pass  # the default of its match
            case ast.match_case():
                total += 1
            case _:
                total += isinstance(node, BRANCH)
    return total


def outermost(node: ast.AST) -> Iterator[Function]:
    """The functions and methods in a module, without those inside of functions."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, Function):
            yield inner
        else:
            yield from outermost(inner)


def _definitions(
    scope: ast.Module | ast.ClassDef, prefix: str, scope_is_public: bool
) -> Iterator[tuple[str, ast.stmt, bool]]:
    for node in scope.body:
        if isinstance(node, Function | ast.ClassDef):
            name = prefix + node.name
            is_public = scope_is_public and not node.name.startswith("_")
            yield name, node, is_public
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{name}.", is_public)


def docstrings(tree: ast.Module) -> Iterator[ast.stmt]:
    """The docstrings of modules, classes and functions, and those below attributes of classes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | Function):
            continue
        for before, statement in zip((None, *node.body), node.body, strict=False):
            is_first = before is None
            is_below_attribute = isinstance(node, ast.ClassDef) and isinstance(
                before, ast.AnnAssign
            )
            if (is_first or is_below_attribute) and is_string(statement):
                yield statement


def is_string(statement: ast.stmt) -> bool:
    """Whether a statement is nothing but a string."""
    match statement:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


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
        """Code lines of all files that have any, so not of an empty `__init__`."""
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
        core_first = sorted(lines, key=lambda room: room != "core")
        return {room: lines[room] for room in core_first if lines[room]}

    def complexities(self) -> dict[str, int]:
        """Cyclomatic complexity of all functions, those inside of others too."""
        return {
            f"{file.path.relative_to(self.folder)}:{node.lineno} {node.name}": complexity(node)
            for file in self.files
            for node in ast.walk(file.tree)
            if isinstance(node, Function)
        }

    def repeated_names(self) -> dict[str, list[str]]:
        """Names of public functions and classes that more than one module defines, and where."""
        paths_by_name: dict[str, list[str]] = defaultdict(list)
        for file in self.files:
            for name, _, is_public in file.definitions():
                if is_public and "." not in name:
                    paths_by_name[name].append(str(file.path))
        return {name: paths for name, paths in sorted(paths_by_name.items()) if len(paths) > 1}

    def undocumented(self) -> list[str]:
        """Modules, and their public classes and functions, without a docstring.

        A body of a line or two needs none beside its name.
        """
        places = []
        for file in self.files:
            if file.lines and not ast.get_docstring(file.tree):
                places.append(str(file.path))
        for file in self.files:
            for name, node, is_public in file.definitions():
                if not is_public or "." in name or file.length(node) <= 3:
                    continue
                if isinstance(node, Function | ast.ClassDef) and not ast.get_docstring(node):
                    places.append(f"{file.path}: {name}")
        return places


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
    """Run the packaged demo with the package of a tree, up to its first backward pass or its end.

    Returns the first lines of the called functions by file, and counts.
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
        report = json.loads((folder / REPORT).read_text())
        executed = {Path(file): lines for file, lines in report["executed"].items()}
        return executed, report["counts"]


def _train_inside(folder: Path, tree: Path, end: str) -> None:
    """Run tests/tools/executed_lines.py in an empty folder; it ends this process."""
    with (folder / LOG).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(tree))
    sys.argv[1:] = [str(tree), REPORT, end]
    runpy.run_path(str(Path(__file__).with_name("executed_lines.py")), run_name="__main__")


def measure_run(tree: Path) -> dict[str, float]:
    """What the packaged demo executes before its first backward pass, and as a whole."""
    before_backward, counts = train_demo(tree, "backward")
    to_the_end, _ = train_demo(tree, "end")
    lines_by_part: dict[str, int] = defaultdict(int)
    for path, called in to_the_end.items():
        room = path.relative_to(tree / "simpletuner").parts[0]
        part = {"annexes": "annexes", "cli": "commands"}.get(room, "core")
        lines_by_part[part] += read(path).executed(called)

    figures: dict[str, float] = {
        "files executed": len(before_backward),
        "  their code lines": sum(len(read(path).lines) for path in before_backward),
        **counts,
    }
    for part, lines in sorted(lines_by_part.items(), reverse=True):
        figures[f"executed to the end, {part}"] = lines
    return figures


def measure(tree: Path, run: bool) -> dict[str, float]:
    """All figures of a tree."""
    figures = table(House.at(tree / "simpletuner"))
    if run:
        figures |= measure_run(tree)
    return figures


def print_figures(now: dict[str, float], before: dict[str, float] | None) -> None:
    """Print one figure a line, with those of an earlier version beside them, and the change."""
    if before is None:
        for title, value in now.items():
            print(f"{title:38}{value:>8}")
        return

    for title in {**now, **before}:
        old = before.get(title, 0)
        new = now.get(title, 0)
        difference = round(new - old, 3)
        change = f"{difference:+}" if difference else ""
        print(f"{title:38}{old:>8}{new:>8}{change:>8}")


def main() -> None:
    """Print the figures of this tree."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.house", description=__doc__)
    parser.add_argument("--against", metavar="REF", help="a commit, or the folder of a tree")
    parser.add_argument("--run", action="store_true", help="count what the demo executes, too")
    arguments = parser.parse_args()
    gc.disable()  # syntax trees have no cycles; the search for some took half of the time
    if arguments.run:
        for name in LIBRARIES:
            import_module(name)
    gc.freeze()  # a run collects after each encoder, and must not scan the libraries again
    now = measure(ROOT, arguments.run)
    before = measure_version(arguments.against, arguments.run) if arguments.against else None
    print_figures(now, before)


def measure_version(reference: str, run: bool) -> dict[str, float]:
    """All figures of a commit, or of the tree in a folder."""
    if Path(reference, "simpletuner").is_dir():
        return measure(Path(reference).resolve(), run)
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        git = ["git", "-C", str(ROOT), "archive", reference, "simpletuner"]
        archive = subprocess.run(git, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        return measure(Path(folder), run)


if __name__ == "__main__":
    main()
