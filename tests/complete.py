"""What a part of the program lacks in other rooms, all of it at once: `python -m tests.complete`.

A technique has keys, a page, and entries in lists of tests, and each list is in another room. A check below looks at
all additions of one kind, and yields a sentence for each missing part.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from inspect import isfunction
from pathlib import Path

from simpletuner import techniques
from simpletuner.config.schema import GROUPS, all_options
from simpletuner.config.sections import SECTIONS
from simpletuner.planning.techniques.spec import TechniqueSpec
from simpletuner.planning.techniques.table import SPECS
from simpletuner.techniques.base import Technique
from simpletuner.techniques.table import TECHNIQUES
from tests.techniques.neutral import NEUTRAL
from tests.training import lockstep

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# Pages that name every key or technique, and explain none.
LISTS = ("OPTIONS.md", "CHANGES.md", "EXTENDING.md", "ARCHITECTURE.md", "EVIDENCE.md")
# The keys of datasets that turn a technique on which has no keys of its own.
DATASET_KEYS = {"slider": "slider_strength", "regularisation": "is_regularisation_data"}


def lacking() -> list[str]:
    """What is missing, one sentence for each part."""
    return [f"{kind}: {sentence}" for kind, check in CHECKS.items() for sentence in check()]


def check_techniques() -> Iterator[str]:
    """Every technique has its class, keys, page and tests, and no list names one that does not exist."""
    for technique in SPECS:
        for part in lacking_of_technique(technique):
            yield f"{technique.name!r} has no {part}"
    for technique_class in defined_techniques():
        if technique_class not in TECHNIQUES.values():
            yield f"{technique_class.__name__} has no name in TECHNIQUES (simpletuner/techniques/table.py)"
    names = {technique.name for technique in SPECS}
    together = set()
    for case in lockstep.TOGETHER.values():
        together |= {name for name in case["names"] if name != lockstep.FACING}
    lists: dict[str, Iterable[str]] = {
        "TECHNIQUES (simpletuner/techniques/table.py)": TECHNIQUES,
        "NEUTRAL (tests/techniques/neutral.py)": NEUTRAL,
        "TECHNIQUES (tests/training/lockstep.py)": lockstep.TECHNIQUES,
        "TOGETHER (tests/training/lockstep.py)": together,
    }
    for place, entries in lists.items():
        for entry in entries:
            if entry not in names:
                yield f"{entry!r} in {place} is no name in SPECS (simpletuner/planning/techniques/table.py)"


def lacking_of_technique(technique: type[TechniqueSpec]) -> Iterator[str]:
    """What a technique lacks, worded to follow "has no"."""
    name = technique.name
    if name not in TECHNIQUES:
        yield "class in TECHNIQUES (simpletuner/techniques/table.py)"
    if name not in NEUTRAL:
        yield "neutral settings in NEUTRAL (tests/techniques/neutral.py), which are trained and compared"
    if name not in lockstep.TECHNIQUES:
        yield "settings in TECHNIQUES (tests/training/lockstep.py)"
    if not any(name in case["names"] for case in lockstep.TOGETHER.values()):
        yield "case in TOGETHER (tests/training/lockstep.py), where two processes are compared with one"
    if technique.keys is None:
        key = DATASET_KEYS.get(name)
        if key is None:
            yield "key in DATASET_KEYS (tests/complete.py), since it has no group of options"
            return
    else:
        key = next(iter(technique.keys.model_fields))
        if technique.keys not in GROUPS.values():
            yield f"field for {technique.keys.__name__} in RunConfig (simpletuner/config/schema.py)"
        if not any(technique.keys.__doc__ in section.groups for section in SECTIONS):
            yield f"place for {technique.keys.__doc__!r} in simpletuner/config/sections.toml"
    pages = pages_about(key)
    if not pages:
        yield f"page in docs/ that names {key}"
    elif not any(f"docs/{page}" in read(ROOT / "README.md") for page in pages):
        yield f"row in README.md for its page ({' or '.join(pages)})"


def defined_techniques() -> list[type[Technique]]:
    """The classes of all files of the room."""
    for module in pkgutil.iter_modules(techniques.__path__):
        importlib.import_module(f"{techniques.__name__}.{module.name}")
    room = f"{techniques.__name__}."
    return [each for each in Technique.__subclasses__() if each.__module__.startswith(room)]


def check_methods() -> Iterator[str]:
    """Every method of a technique is in the table of docs/EXTENDING.md."""
    table = read(DOCS / "EXTENDING.md")
    for name, method in vars(Technique).items():
        is_method = isfunction(method) or isinstance(method, classmethod)
        if is_method and not name.startswith("_") and f"`{name}" not in table:
            yield f"Technique.{name} has no row in docs/EXTENDING.md"


def check_options() -> Iterator[str]:
    """The pages that the help of an option names exist."""
    for name, option in all_options().items():
        for page in re.findall(r"docs/[\w/]+\.md", option.help):
            if not (ROOT / page).is_file():
                yield f"{name} has no page: its help names {page}"


# Further kinds of additions get a line here.
CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "technique": check_techniques,
    "method": check_methods,
    "option": check_options,
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
