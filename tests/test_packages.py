"""No release of a package that nobody has tried is installed, and the versions that were tried are
on a page.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINES = [
    *PROJECT["dependencies"],
    *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
]
PACKAGES = [
    requirement for requirement in map(Requirement, LINES) if requirement.name != PROJECT["name"]
]


def end(requirement: Requirement, operator: str) -> Version:
    (version,) = [bound.version for bound in requirement.specifier if bound.operator == operator]
    return Version(version)


@pytest.mark.parametrize("requirement", PACKAGES, ids=lambda requirement: requirement.name)
def test_every_requirement_has_lower_and_upper_bounds(requirement: Requirement) -> None:
    """The upper one is a major version; before 1.0, where minor versions break, one of these; of
    torch, too.
    """
    oldest = end(requirement, ">=")
    first_untried = end(requirement, "<")
    assert oldest < first_untried

    by_minor = first_untried.major == 0 or requirement.name == "torch"
    assert len(first_untried.release) == (2 if by_minor else 1)


def tried() -> list[dict[str, str]]:
    """The rows of the table, by the names of its columns."""
    page = (ROOT / "docs" / "VERSIONS.md").read_text(encoding="utf-8")
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in re.findall(r"^\|.*$", page, re.M)
    ]
    return [dict(zip(head, row, strict=True)) for row in rows]


def test_bounds_match_the_tested_versions() -> None:
    """Whoever moves an end runs `scripts/matrix`, which prints the table."""
    rows = tried()
    (oldest,) = [row for row in rows if row["packages"] == "oldest"]
    newest = [row for row in rows if row["packages"] == "newest"]
    assert newest
    for requirement in PACKAGES:
        if requirement.name in oldest:
            assert Version(oldest[requirement.name]) in requirement.specifier
            assert (
                Version(oldest[requirement.name]).release[:2] == end(requirement, ">=").release[:2]
            ), requirement.name
            last = max(Version(row[requirement.name]) for row in newest)
            assert last in requirement.specifier
            assert (
                last.release[: len(end(requirement, "<").release)] < end(requirement, "<").release
            )


def test_messages_advise_what_the_extras_install() -> None:
    """A name on the public index, with the versions that were tried; `simpletuner` itself is
    another program there.
    """
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "simpletuner").rglob("*.py")
    )
    advised = re.findall(
        r"""Package\(\s*"[\w.]+", "([^"]+)"\)|pip install '([a-z0-9-]+>=[^']+<[^']+)'""", sources
    )
    declared = {line.split(";")[0].strip() for line in LINES}

    # Kernels of attention are built for the torch and the card at hand; no extra could name a
    # version.
    kernels = {"flash-attn", "flash-attn-3", "flash-attn-4>=4.0.0b36,<5", "xformers"}

    assert {first or second for first, second in advised} <= declared | kernels
    assert len(advised) >= 10
    assert "pip install 'simpletuner" not in sources
