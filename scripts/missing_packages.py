"""Print which requirements of pyproject.toml are not installed; the exit code is 1 if any is.

Arguments are names of extras. Versions outside of the required range count as missing.
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

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
PROJECT = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]


def requirements(lines: list[str]) -> Iterator[Requirement]:
    """The requirements for this machine, and those of the project's extras among them."""
    for requirement in map(Requirement, lines):
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                yield from requirements(PROJECT["optional-dependencies"][extra])
        elif requirement.marker is None or requirement.marker.evaluate():
            yield requirement


def is_installed(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return False


def main(extras: list[str]) -> None:
    required = [Requirement(PROJECT["name"]), *requirements(PROJECT["dependencies"])]
    for extra in extras:
        required += requirements(PROJECT["optional-dependencies"][extra])
    missing = [str(requirement) for requirement in required if not is_installed(requirement)]
    if missing:
        print(f"Missing: {', '.join(missing)}")
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
