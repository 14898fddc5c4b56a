"""Small faults of a program, as a tired programmer makes them: one change of one line each.

An operator of OPERATORS looks at one node of the syntax tree and yields the faults that it can make
of it. A fault replaces a piece of the source, so that what is printed is the line itself.
"""

from __future__ import annotations

import ast
import difflib
import random
import re
import tomllib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

# Annexes and commands surround the core, and the rest of this list holds no rules.
ROOMS_OUTSIDE = ("annexes", "cli", "docs", "examples", "__init__.py", "__main__.py")
EQUIVALENTS = Path(__file__).with_name("equivalents.toml")
# Of keyword arguments: they matter to readers, to mypy, or where the program is wrong already.
WITHOUT_EFFECT = (
    "strict",
    "frozen",
    "slots",
    "repr",
    "kw_only",
    "maxsize",
    "encoding",
    "stacklevel",
)
NAME = re.compile(r"[a-z][a-z0-9_.\-]*")  # of events, keys and kinds, unlike texts for people

COMPARISONS = {
    "==": ("!=",),
    "!=": ("==",),
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "is": ("is not",),
    "is not": ("is",),
    "in": ("not in",),
    "not in": ("in",),
}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "//", "**": "*"}
EXTREMES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
}


@dataclass(frozen=True)
class Fault:
    """One piece of one file, and what it is replaced by.

    Attributes:
        path: below the root of the tree, with slashes.
        line: of the first character that is replaced, from 1.
        operator: the name of what made it.
        start, end: of the piece, in bytes of UTF-8.
        names: what encloses it, from the outermost class or function; at the top level, the name
            that is assigned.
    """

    path: str
    line: int
    operator: str
    start: int
    end: int
    new: str
    names: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    def apply(self, source: str) -> str:
        """The text of the file with the fault."""
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def difference(self, source: str) -> list[str]:
        """The changed lines, as `diff -U0` prints them."""
        changed = self.apply(source).splitlines()
        lines = difflib.unified_diff(source.splitlines(), changed, n=0, lineterm="")
        return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


@dataclass
class Module:
    """The source of one file, with the places of its nodes.

    Attributes:
        starts: the offset of every line, in bytes.
    """

    path: str
    source: str
    data: bytes = b""
    starts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.data = self.source.encode()
        position = 0
        for line in self.data.splitlines(keepends=True):
            self.starts.append(position)
            position += len(line)

    def start(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def text(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()


# A piece of the source as (start, end), and what replaces it.
Change = tuple[int, int, str]
Operator = Callable[[Module, ast.AST], Iterator[Change]]


def whole(module: Module, node: ast.AST, new: str) -> Change:
    """Replace a node."""
    return module.start(node), module.end(node), new


def between(module: Module, left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Change]:
    """Replace a word or sign between two nodes, which may have brackets around them."""
    start = module.end(left)
    end = module.start(right)
    gap = module.data[start:end].decode()
    pattern = rf"\b{old}\b" if old.isalpha() else re.escape(old)
    match = re.search(pattern.replace(" ", r"\s+"), gap)
    if match:
        yield start, end, gap[: match.start()] + new + gap[match.end() :]


SIGNS: dict[type[ast.AST], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.And: "and",
    ast.Or: "or",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}


def comparison(module: Module, node: ast.AST) -> Iterator[Change]:
    """`<` becomes `<=` or `>=`, `is` becomes `is not`."""
    if not isinstance(node, ast.Compare):
        return
    left = node.left
    for sign, right in zip(node.ops, node.comparators, strict=True):
        old = SIGNS[type(sign)]
        for new in COMPARISONS[old]:
            yield from between(module, left, right, old, new)
        left = right


def boolean(module: Module, node: ast.AST) -> Iterator[Change]:
    """`and` becomes `or`."""
    if not isinstance(node, ast.BoolOp):
        return
    old = SIGNS[type(node.op)]
    new = "or" if old == "and" else "and"
    for left, right in zip(node.values, node.values[1:], strict=False):
        yield from between(module, left, right, old, new)


def operand(module: Module, node: ast.AST) -> Iterator[Change]:
    """One part of `a and b` is forgotten."""
    if not isinstance(node, ast.BoolOp):
        return
    joined = f" {SIGNS[type(node.op)]} "
    for left_out in node.values:
        kept = [f"({module.text(value)})" for value in node.values if value is not left_out]
        yield whole(module, node, f"({joined.join(kept)})")


def condition(module: Module, node: ast.AST) -> Iterator[Change]:
    """A condition is negated."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield whole(module, node.test, f"(not ({module.text(node.test)}))")
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield whole(module, test, f"(not ({module.text(test)}))")


def branch(module: Module, node: ast.AST) -> Iterator[Change]:
    """One branch is always taken."""
    if isinstance(node, ast.If | ast.IfExp):
        yield whole(module, node.test, "False")
        yield whole(module, node.test, "True")
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield whole(module, test, "True")


def arithmetic(module: Module, node: ast.AST) -> Iterator[Change]:
    """`+` becomes `-`, `*` becomes `/`."""
    if not isinstance(node, ast.BinOp | ast.AugAssign):
        return
    old = SIGNS.get(type(node.op))
    if old not in ARITHMETIC:
        return
    if isinstance(node, ast.AugAssign):
        yield from between(module, node.target, node.value, old + "=", ARITHMETIC[old] + "=")
        return
    is_text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not isinstance(
        getattr(node.left, "value", ""), int | float
    )
    if not is_text:
        yield from between(module, node.left, node.right, old, ARITHMETIC[old])


def sign(module: Module, node: ast.AST) -> Iterator[Change]:
    """A minus or `not` is forgotten."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield whole(module, node, f"({module.text(node.operand)})")


def number(module: Module, node: ast.AST) -> Iterator[Change]:
    """A number is one more or one less."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield whole(module, node, repr(node.value + 1))
        yield whole(module, node, f"({node.value - 1!r})")


def switch(module: Module, node: ast.AST) -> Iterator[Change]:
    """True becomes False."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield whole(module, node, str(not node.value))


def name(module: Module, node: ast.AST) -> Iterator[Change]:
    """The name of an event, a key or a kind is misspelled."""
    is_name = isinstance(node, ast.Constant) and isinstance(node.value, str)
    if is_name and NAME.fullmatch(node.value) and module.text(node)[0] in "\"'":  # type: ignore
        yield whole(module, node, f'"{node.value}_"')  # type: ignore[attr-defined]


def extreme(module: Module, node: ast.AST) -> Iterator[Change]:
    """`min` becomes `max`, `any` becomes `all`."""
    if not isinstance(node, ast.Call):
        return
    function = node.func
    called = function.attr if isinstance(function, ast.Attribute) else module.text(function)
    if called in EXTREMES:
        end = module.end(function)
        yield end - len(called), end, EXTREMES[called]


def call(module: Module, node: ast.AST) -> Iterator[Change]:
    """A call for its effect is forgotten."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield whole(module, node, "pass")


def assignment(module: Module, node: ast.AST) -> Iterator[Change]:
    """An assignment is forgotten, where the target has a value before."""
    if isinstance(node, ast.AugAssign):
        yield whole(module, node, "pass")
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        read = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        is_changed = isinstance(target, ast.Name) and target.id in read
        if is_changed or isinstance(target, ast.Attribute | ast.Subscript):
            yield whole(module, node, "pass")


def refusal(module: Module, node: ast.AST) -> Iterator[Change]:
    """An error is not raised."""
    if isinstance(node, ast.Raise) and node.exc is not None:
        yield whole(module, node, "pass")


def leap(module: Module, node: ast.AST) -> Iterator[Change]:
    """A loop goes on where it ends, or the other way round."""
    if isinstance(node, ast.Break):
        yield whole(module, node, "continue")
    if isinstance(node, ast.Continue):
        yield whole(module, node, "break")


def keyword(module: Module, node: ast.AST) -> Iterator[Change]:
    """An argument is forgotten, so that its default counts."""
    if not isinstance(node, ast.Call):
        return
    for argument in node.keywords:
        if argument.arg is None or argument.arg in WITHOUT_EFFECT:
            continue
        end = module.end(argument)
        comma = re.match(rb"\s*,\s*", module.data[end:])
        yield module.start(argument), end + (comma.end() if comma else 0), ""


OPERATORS: dict[str, Operator] = {
    operator.__name__: operator
    for operator in (
        comparison,
        boolean,
        operand,
        condition,
        branch,
        arithmetic,
        sign,
        number,
        switch,
        name,
        extreme,
        call,
        assignment,
        refusal,
        leap,
        keyword,
    )
}


def faults_of(path: str, source: str) -> list[Fault]:
    """All faults that can be planted in a file; a few of them do not compile."""
    module = Module(path, source)
    found: dict[Change, Fault] = {}
    for node, names in code_nodes(ast.parse(source)):
        for operator, make in OPERATORS.items():
            for change in make(module, node):
                line = bisect_right(module.starts, change[0])
                found.setdefault(change, Fault(path, line, operator, *change, names))
    return sorted(found.values(), key=lambda fault: (fault.line, fault.start, fault.operator))


def compiles(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def code_nodes(tree: ast.Module) -> Iterator[tuple[ast.AST, tuple[str, ...]]]:
    """The nodes that do something, each with the names of what encloses it."""
    waiting: list[tuple[ast.AST, tuple[str, ...]]] = [(tree, ())]
    while waiting:
        node, names = waiting.pop()
        yield node, names
        inner = names
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = (*names, node.name)
        elif target := assigned_name(node):
            inner = (*names, target)
        waiting += [(child, inner) for child in children(node)]


def assigned_name(node: ast.AST) -> str | None:
    """The constant or field that a statement declares."""
    target: ast.expr | None = None
    if isinstance(node, ast.AnnAssign):
        target = node.target
    elif isinstance(node, ast.Assign):
        target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a node without annotations and what `is_for_readers`."""
    for title, value in ast.iter_fields(node):
        if title in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not is_for_readers(child):
                yield child


def is_for_readers(node: ast.AST) -> bool:
    """Whether a node is a docstring, a text with values in it, a type, or has no effect."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.JoinedStr():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Subscript(value=ast.Name(id="Literal")):
            return True
        case ast.Call(func=ast.Name(id="TypeVar" | "NewType" | "cast")):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
        case ast.keyword(arg=argument):
            return argument in WITHOUT_EFFECT
    return False


def files_of_the_core(root: Path) -> list[str]:
    """The files in which faults are planted, below a root."""
    package = root / "simpletuner"
    paths = [path.relative_to(package) for path in sorted(package.rglob("*.py"))]
    return [
        f"simpletuner/{path.as_posix()}" for path in paths if path.parts[0] not in ROOMS_OUTSIDE
    ]


def draw(root: Path, count: int, seed: int, paths: Iterable[str]) -> list[Fault]:
    """Choose faults: any line that can be wrong with the same chance, then any fault of it."""
    lines: defaultdict[tuple[str, int], list[Fault]] = defaultdict(list)
    for path in paths:
        for fault in faults_of(path, (root / path).read_text(encoding="utf-8")):
            lines[path, fault.line].append(fault)

    chance = random.Random(seed)
    chosen: list[Fault] = []
    for place in chance.sample(sorted(lines), len(lines)):
        fault = chance.choice(lines[place])
        if compiles(fault.apply((root / fault.path).read_text(encoding="utf-8"))):
            chosen.append(fault)
        if len(chosen) == count:
            break
    return chosen


@dataclass(frozen=True)
class Equivalent:
    """A fault that changes nothing, or nothing that a test without a GPU can see.

    Attributes:
        lines: the lines that it removes and adds, without indentation.
    """

    path: str
    lines: tuple[str, ...]
    reason: str


@cache
def read_equivalents(path: Path = EQUIVALENTS) -> Sequence[Equivalent]:
    """The listed equivalents."""
    equivalents = []
    for file, entries in tomllib.loads(path.read_text(encoding="utf-8")).items():
        for old, new, reason in entries["same"]:
            lines = (f"-{old}", f"+{new}") if new else (f"-{old}",)
            equivalents.append(Equivalent(file, lines, reason))
    return equivalents


def why_equivalent(fault: Fault, source: str) -> str | None:
    """The reason why a fault does not count, if it is listed."""
    lines = tuple(line[0] + line[1:].strip() for line in fault.difference(source))
    for equivalent in read_equivalents():
        if equivalent.path == fault.path and equivalent.lines == lines:
            return equivalent.reason
    return None
