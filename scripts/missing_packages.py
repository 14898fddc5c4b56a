"""Print which requirements of pyproject.toml the running Python lacks; the exit code is 1 when
there are any.

Arguments are names of extras. Older or newer versions than asked for count as missing.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    from packaging.requirements import Requirement
except ModuleNotFoundError:  # every requirement brings it along, so this environment is empty
    sys.exit("Missing: everything")

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]


def requirements(lines: list[str]) -> Iterator[Requirement]:
    """Those that apply on this machine; an extra that names other extras of the project is
    followed.
    """
    for requirement in map(Requirement, lines):
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                yield from requirements(PROJECT["optional-dependencies"][extra])
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def is_here(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def main(extras: list[str]) -> None:
    wanted = [Requirement(PROJECT["name"]), *requirements(PROJECT["dependencies"])]
    wanted += [
        requirement
        for extra in extras
        for requirement in requirements(PROJECT["optional-dependencies"][extra])
    ]
    missing = [str(requirement) for requirement in wanted if not is_here(requirement)]
    if missing:
        print(f"Missing: {', '.join(missing)}")
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
