"""List what parts of the program lack in other rooms: `python -m tests.tools.complete`.

A technique, for example, needs keys, a page, and entries in lists of tests, all in different rooms.
Every check below examines all parts of one kind and yields a sentence for each missing entry.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from inspect import isfunction
from pathlib import Path
from typing import get_args

import typer.main

from benchmarks.models import SMALL
from simpletuner import techniques
from simpletuner.annexes.trackers import TRACKERS
from simpletuner.cli.app import app
from simpletuner.config.remote import SOURCES, RemoteKeys, SourceName
from simpletuner.config.schema import all_options, technique_groups
from simpletuner.config.trackers import PACKAGES
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.planning.techniques.table import SPECS
from simpletuner.techniques.base import Technique
from simpletuner.techniques.load import technique_class
from tests.techniques.cases import CASES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "simpletuner"
# Pages that list keys or techniques without explaining them.
LISTS = ("OPTIONS.md", "CHANGES.md", "EXTENDING.md", "ARCHITECTURE.md", "EVIDENCE.md")
# The keys of datasets that enable a technique without a group of options.
DATASET_KEYS = {"slider": "slider_strength", "regularisation": "is_regularisation_data"}
RUNS = ("lora", "full")  # of tests/training/lockstep.py


def lacking() -> list[str]:
    """What is missing, one sentence for each part."""
    return [f"{kind}: {sentence}" for kind, check in CHECKS.items() for sentence in check()]


def check_techniques() -> Iterator[str]:
    """Every technique has its class, keys, page and tests, and no entry names a removed one."""
    for technique in SPECS:
        for part in lacking_of_technique(technique):
            yield f"{technique.name!r} has no {part}"
    table = "SPECS (simpletuner/planning/techniques/table.py)"
    used_classes = {technique_class(technique) for technique in SPECS}
    for defined in defined_techniques():
        if defined not in used_classes:
            yield f"{defined.__name__} is trained by no spec in {table}"
    used_groups = {technique.keys for technique in SPECS}
    for group in technique_groups():
        if group not in used_groups:
            yield f"{group.__name__} has no spec in {table}"
    names = {technique.name for technique in SPECS}
    for name in CASES:
        if name not in names:
            yield f"{name!r} in CASES (tests/techniques/cases.py) is not a technique"


def lacking_of_technique(technique: type[TechniqueSpec]) -> Iterator[str]:
    """What a technique lacks, worded to follow "has no"."""
    yield from lacking_of_case(technique)
    test = f"tests/techniques/test_{technique_class(technique).__module__.rpartition('.')[2]}.py"
    if not (ROOT / test).is_file():
        yield f"test of its own ({test})"
    if technique.keys is None:
        key = DATASET_KEYS.get(technique.name)
        if key is None:
            yield "key in DATASET_KEYS (tests/tools/complete.py), since it has no group of options"
            return
    else:
        key = next(iter(technique.keys.model_fields))
        if technique.keys not in technique_groups():
            yield (
                f"file below simpletuner/config/techniques/ that declares {technique.keys.__name__}"
            )
    pages = pages_about(key)
    if not pages:
        yield f"page in docs/ that names {key}"
    elif not any(f"docs/{page}" in read(ROOT / "README.md") for page in pages):
        yield f"row in README.md for its page ({' or '.join(pages)})"


def lacking_of_case(technique: type[TechniqueSpec]) -> Iterator[str]:
    """What the case of a technique lacks among the cases that all techniques are tested with."""
    file = "tests/techniques/cases.py"
    case = CASES.get(technique.name)
    if case is None:
        yield f"case in CASES ({file})"
        return
    if not case.neutral:
        yield f"neutral settings in its case ({file}), which are trained and compared"
    if not {*case.runs} & {*RUNS} and not case.apart:
        yield f"run in its case ({file}), in which two processes are compared with one"


def defined_techniques() -> list[type[Technique]]:
    """The classes of all files below simpletuner/techniques/."""
    for module in pkgutil.iter_modules(techniques.__path__):
        importlib.import_module(f"{techniques.__name__}.{module.name}")
    room = f"{techniques.__name__}."
    return [
        defined for defined in Technique.__subclasses__() if defined.__module__.startswith(room)
    ]


def check_methods() -> Iterator[str]:
    """Every method of a technique is in the table of docs/EXTENDING.md."""
    table = read(DOCS / "EXTENDING.md")
    for name, method in vars(Technique).items():
        is_method = isfunction(method) or isinstance(method, classmethod)
        if is_method and not name.startswith("_") and f"`{name}" not in table:
            yield f"Technique.{name} has no row in docs/EXTENDING.md"


def check_options() -> Iterator[str]:
    """Every option has a help, and the pages that it names exist."""
    for name, option in all_options().items():
        if not option.help:
            yield f"{name} has no help: a docstring below it"
        for page in re.findall(r"docs/[\w/]+\.md", option.help):
            if not (ROOT / page).is_file():
                yield f"{name} has no page: its help names {page}"


def check_sources() -> Iterator[str]:
    """Every type of dataset has a lister, and its keys are dataset keys and on the page."""
    page = read(DOCS / "DATALOADER.md")
    for name in sorted({*SOURCES} ^ {*get_args(SourceName)}):
        yield f"{name!r} is in only one of SourceName and SOURCES (simpletuner/config/remote.py)"
    for name, source in SOURCES.items():
        if f"`{name}`" not in page:
            yield f"{name!r} has no row in docs/DATALOADER.md"
        try:
            pkgutil.resolve_name(source.lister)
        except (ImportError, AttributeError, ValueError):
            yield f"{name!r} has no lister: {source.lister!r} cannot be imported"
        if not issubclass(RemoteKeys, source.keys):
            yield (
                f"{name!r} has keys that no dataset has: {source.keys.__name__} is not a base of "
                "RemoteKeys"
            )
        for key in source.keys.model_fields:
            if f"`{key}`" not in page:
                yield f"{key} of {name!r} has no row in docs/DATALOADER.md"


def check_families() -> Iterator[str]:
    """Every family is registered, measured, compared with its pipeline and described."""
    for path in sorted(PACKAGE.glob("models/*/spec.py")):
        module = importlib.import_module(f"simpletuner.models.{path.parent.name}.spec")
        for spec in vars(module).values():
            if isinstance(spec, FamilySpec) and spec.name not in FAMILIES:
                yield f"{spec.name!r} has no place in FAMILIES (simpletuner/models/registry.py)"
    for spec in FAMILIES.values():
        for part in lacking_of_family(spec):
            yield f"{spec.name!r} has no {part}"


def lacking_of_family(spec: FamilySpec) -> Iterator[str]:
    """What a family lacks, worded to follow "has no"."""
    folder = ROOT.joinpath(*spec.cost.package.split("."))
    if spec.cost.transformer_class not in SMALL:
        yield f"small {spec.cost.transformer_class} in SMALL (benchmarks/models.py)"
    if not (folder / "cost.json").is_file():
        table = (folder / "cost.json").relative_to(ROOT)
        yield f"{table}, which `python -m benchmarks.cost_table --only {spec.name}` measures"
    pages = [page for page in DOCS.glob("quickstart/*.md") if f'"{spec.name}"' in read(page)]
    if not pages:
        yield "page below docs/quickstart/"
    elif not any(f"docs/quickstart/{page.name}" in read(ROOT / "README.md") for page in pages):
        yield f"link in README.md to its page (docs/quickstart/{pages[0].name})"
    has_section = re.search(rf"^##.*{spec.title}", read(DOCS / "FIDELITY.md"), re.MULTILINE)
    tests = [*ROOT.glob("tests/fidelity/*.py"), ROOT / "tests" / "tools" / "families.py"]
    is_tested = any(spec.name in read(path) or spec.title in read(path) for path in tests)
    if not has_section and not is_tested:
        yield "section in docs/FIDELITY.md, and no test in tests/fidelity/"
    if not any(f'"{spec.name}"' in read(path) for path in PACKAGE.glob("examples/*/config.json")):
        yield "example below simpletuner/examples/"


def check_subscribers() -> Iterator[str]:
    """Every subscriber of a run is in the list of those whose failure is tested."""
    tested = read(ROOT / "tests" / "run" / "test_events.py")
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "api.py":  # it subscribes for a program, not for a run
            continue
        for name in subscribed(ast.parse(read(path))):
            if f'"{name}": ' not in tested:
                yield f"{name!r} has no row in SUBSCRIBERS (tests/run/test_events.py)"


def subscribed(tree: ast.Module) -> Iterator[str]:
    """The names that a module writes in its calls of `subscribe`."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="subscribe"), args=[ast.Constant(value=str(name)), *_]
            ):
                yield name


def check_trackers() -> Iterator[str]:
    """Every tracker has a class, a package or None, and is named where it is chosen."""
    for name in sorted({*TRACKERS} | {*PACKAGES}):
        if name not in TRACKERS:
            yield f"{name!r} has no class in TRACKERS (simpletuner/annexes/trackers.py)"
        if name not in PACKAGES:
            yield f"{name!r} has no package, or None, in PACKAGES (simpletuner/config/trackers.py)"
        if name not in all_options()["report_to"].help:
            yield (
                f"{name!r} has no mention in the help of report_to (simpletuner/config/trackers.py)"
            )


def check_commands() -> Iterator[str]:
    """Every command is on a page."""
    pages = "".join(read(path) for path in [ROOT / "README.md", *DOCS.glob("*.md")])
    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        if f"simpletuner {name}" not in pages:
            yield f"{name!r} has no mention in README.md or docs/"


# Further kinds of additions get a line here.
CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "technique": check_techniques,
    "method": check_methods,
    "option": check_options,
    "source": check_sources,
    "family": check_families,
    "subscriber": check_subscribers,
    "tracker": check_trackers,
    "command": check_commands,
}


def pages_about(key: str) -> list[str]:
    """The pages below docs/ that explain a key."""
    pages = []
    for path in sorted([*DOCS.glob("*.md"), *(DOCS / "experimental").glob("*.md")]):
        if path.name not in LISTS and re.search(rf'[`"]{key}[`"]', read(path)):
            pages.append(path.relative_to(DOCS).as_posix())
    return pages


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


if __name__ == "__main__":
    missing = lacking()
    print("\n".join(missing) or "Nothing is missing.")
    sys.exit(bool(missing))
