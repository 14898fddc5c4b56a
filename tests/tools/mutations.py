"""Change one line at a time in a copy of the tree, and check that the tests fail.

`./scripts/mutations [--only NAME]...` tries the changes of mutations.toml; with `--random COUNT` it
tries faults that nobody has chosen (random_mutations.py). The working tree is not touched.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutations.toml")
PARTS = ("simpletuner", "tests", "benchmarks")  # what the tests import
PAGES = "docs"  # what some of them read
LIMIT_SECONDS = 900  # of one run of pytest, also that of the tests of all mutations
PASSED = int(pytest.ExitCode.OK)
# What the exit code of the tests means for a mutation. Collection fails where a module cannot be
# imported, which proves nothing.
OUTCOMES = {
    int(pytest.ExitCode.TESTS_FAILED): "killed",
    PASSED: "SURVIVED",
    int(pytest.ExitCode.INTERRUPTED): "UNCOLLECTED",
    int(pytest.ExitCode.USAGE_ERROR): "UNCOLLECTED",
    int(pytest.ExitCode.NO_TESTS_COLLECTED): "UNCOLLECTED",
    -signal.SIGALRM: "HUNG",
}


@dataclass(frozen=True)
class Mutation:
    """A change that some tests must notice.

    Attributes:
        room: the folder that holds the text. Its file is searched for, so code may move between
            files.
        old: the text, which occurs once in the room. Its layout does not count, so formatting the
            source breaks no mutation.
        new: the replacement.
        tests: as given to pytest, from the root.
    """

    name: str
    room: str
    old: str
    new: str
    tests: tuple[str, ...]

    def find(self, root: Path = ROOT) -> Path:
        """The file with the text.

        Raises:
            LookupError: the text has changed, or occurs more than once.
        """
        pattern = any_layout(self.old)
        counts: dict[Path, int] = {}
        for path in sorted((root / self.room).rglob("*.py")):
            matches = len(pattern.findall(path.read_text(encoding="utf-8")))
            if matches:
                counts[path] = matches
        total = sum(counts.values())
        if total != 1:
            raise LookupError(f"{self.name}: {self.old!r} occurs {total} times in {self.room}")
        return next(iter(counts))

    def apply(self, source: str) -> str:
        """The text of the file with the change."""
        return any_layout(self.old).sub(lambda _: self.new, source)


def any_layout(text: str) -> re.Pattern[str]:
    """A pattern that finds a piece of source however it is laid out.

    Spaces may be line breaks, and brackets may be followed by a line break, with a comma before the
    closing one. Indentation at the start of `text` is that of the source.
    """
    body = text.lstrip()
    pattern = [re.escape(text[: len(text) - len(body)])]
    for part in re.findall(r"\s+|[(\[{]|[)\]}]|[^\s()\[\]{}]+", body):
        if part.isspace():
            pattern.append(r"\s+")
        elif part in "([{":
            pattern.append(re.escape(part) + r"\s*")
        elif part in ")]}":
            pattern.append(r"(?:,?\s+)?" + re.escape(part))
        else:
            pattern.append(re.escape(part))
    return re.compile("".join(pattern))


def read_list() -> list[Mutation]:
    """All mutations, in the order of the file."""
    mutations = []
    for room, entries in tomllib.loads(LIST.read_text(encoding="utf-8")).items():
        for name, (old, new, *tests) in entries.items():
            paths = tuple(f"tests/{test}" for test in tests)
            mutations.append(Mutation(name, room, old, new, paths))
    return mutations


def run_tests(
    tree: Path, tests: Sequence[str], log: Path, *options: str, plugins: Sequence[object] = ()
) -> int:
    """Run tests of a tree, as paths from its root; returns pytest's exit code.

    They run in a fork of this process, which has imported torch already. What is left of the
    processes that they started is ended.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        with log.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = sys.path[0] = str(tree)
        for name in [module for module in sys.modules if module.partition(".")[0] in PARTS]:
            del sys.modules[name]
        signal.alarm(LIMIT_SECONDS)  # ends this process
        words = ["-n", "0", "-q", "-p", "no:cacheprovider", *options, *tests]
        os._exit(pytest.main(words, [*plugins]))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return code


@contextlib.contextmanager
def planted(path: Path, source: str, number: int) -> Iterator[None]:
    """Give a file another content for a while.

    Args:
        number: another one for every content: Python compiles a file again whose time has changed.
    """
    original = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    os.utime(path, (number, number))
    try:
        yield
    finally:
        path.write_text(original, encoding="utf-8")
        os.utime(path, (0, 0))


def judge(
    mutations: Sequence[Mutation], tree: Path, log: Path, *, sound: bool
) -> Iterator[tuple[Mutation, str, float]]:
    """Yield every mutation with its outcome and the seconds that it took.

    Args:
        sound: all tests pass without a mutation. If not, the tests of a mutation are first run
            without it: where they fail, their failure with it would prove nothing.
    """
    for number, mutation in enumerate(mutations, 1):
        start = time.monotonic()
        unchanged = PASSED if sound else run_tests(tree, mutation.tests, log, "-x")
        if unchanged == PASSED:
            outcome = OUTCOMES.get(run_mutated(mutation, tree, log, number), "BROKEN")
        else:
            outcome = OUTCOMES.get(unchanged, "BROKEN").replace("killed", "RED") + " without it"
        yield mutation, outcome, time.monotonic() - start


def run_mutated(mutation: Mutation, tree: Path, log: Path, number: int) -> int:
    """Run the tests of a mutation with it; returns pytest's exit code."""
    path = mutation.find(tree)
    with planted(path, mutation.apply(path.read_text(encoding="utf-8")), number):
        return run_tests(tree, mutation.tests, log, "-x")


def main() -> int:
    """Judge the mutations; 1 if one was not killed, or could not be judged."""
    parser = argparse.ArgumentParser(prog="mutations", description=__doc__)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="judge this mutation (may be repeated)"
    )
    parser.add_argument(
        "--random", type=int, metavar="COUNT", help="plant this many random faults in the core"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random faults (0)")
    parser.add_argument(
        "--in",
        action="append",
        dest="parts",
        metavar="PATH",
        help="plant them in this file or folder (may be repeated)",
    )
    parser.add_argument(
        "--at",
        action="append",
        metavar="FILE:LINE",
        help="of the drawn faults, judge the one at this place (may be repeated)",
    )
    parser.add_argument(
        "--seconds", type=float, default=90, help="for the tests of one random fault (90)"
    )
    arguments = parser.parse_args()
    if arguments.random:
        from tests.tools import random_mutations

        return random_mutations.main(
            arguments.random,
            arguments.seed,
            arguments.parts or (),
            arguments.at or (),
            arguments.seconds,
        )
    only = arguments.only
    chosen = [mutation for mutation in read_list() if not only or mutation.name in only]
    import tests.tools.preload  # noqa: F401 - for the forks

    alive = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder, "tree")
        log = Path(folder, "log")
        for part in (*PARTS, PAGES):
            shutil.copytree(ROOT / part, tree / part)
        shutil.copy(ROOT / "pyproject.toml", tree)
        tests_of_all: dict[str, None] = {}
        for mutation in chosen:
            tests_of_all |= dict.fromkeys(mutation.tests)
        sound = run_tests(tree, list(tests_of_all), log) == PASSED
        if not sound:
            print(f"Without any mutation:\n{log.read_text()[-2000:]}", flush=True)
        for mutation, outcome, seconds in judge(chosen, tree, log, sound=sound):
            print(f"{outcome:8} {mutation.name} ({seconds:.1f} s)", flush=True)
            if outcome != "killed":
                alive += 1
                print(f"  {mutation.old}\n  {mutation.new}\n{log.read_text()[-2000:]}")
    print(f"{len(chosen) - alive} of {len(chosen)} killed")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
