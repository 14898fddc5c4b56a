"""Plant random faults in a copy of the core, run the tests that belong to them, show survivors.

`./scripts/mutations --random 40 --seed 7`. What is planted is in faults.py, which tests belong to
it in belonging.py. The working tree is not touched.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.tools.belonging import Suite, TestFunction
from tests.tools.faults import Fault, draw, files_of_the_core, why_equivalent
from tests.tools.mutations import PASSED, ROOT, planted, run_tests

PROCESSES = 2
BROKEN = "broken"
NOTHING_RAN = int(pytest.ExitCode.NO_TESTS_COLLECTED)  # such as GPU tests
BAR = 15  # per cent that may survive
FIRST = 25  # tests that run before the others
SLOWNESS = 4  # of a busy machine
HANGS_AFTER = 120.0  # seconds of a test that is not marked slow
MOST_BYTES = 10 * 2**30  # that a process may allocate: a fault in a size must not fill the machine


@dataclass(frozen=True)
class Verdict:
    """What the tests said of a fault.

    Attributes:
        killer: the test that failed or hung; without one, the fault has survived.
        how: "failed", "hung", "crashed", or "not imported" if a module cannot be imported; BROKEN
            if pytest itself has failed, which proves nothing.
        tests: the number of tests that ran.
        is_cut: the time was up before all tests had run.
    """

    fault: Fault
    killer: str = ""
    how: str = ""
    tests: int = 0
    is_cut: bool = False
    seconds: float = 0.0


@dataclass(eq=False)  # pytest hashes plugins
class Watch:
    """A plugin of pytest that runs chosen tests in their order, and writes what happens.

    Attributes:
        note: the file that tells the test that runs, and how many have run.
        chosen: names of tests without their cases.
        until: the time after which no test is started.
    """

    note: Path
    chosen: Sequence[str]
    until: float
    told: dict[str, object] = field(default_factory=dict)
    tests: int = 0

    def write(self, **more: object) -> None:
        self.told |= {"tests": self.tests, **more}
        self.note.write_text(json.dumps(self.told))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        ranks = {name: number for number, name in enumerate(self.chosen)}
        names = {item: item.nodeid.partition("[")[0] for item in items}
        items[:] = [item for item in items if names[item] in ranks]
        items.sort(key=lambda item: ranks[names[item]])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(running=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        signal.alarm(int(max(HANGS_AFTER, 10 * seconds_of(item))))  # ends this process
        try:
            return (yield)
        finally:
            signal.alarm(0)
            self.tests += 1
            if time.monotonic() > self.until:
                self.write(is_cut=True)
                item.session.shouldstop = "the time is up"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(failed=report.nodeid)


def seconds_of(item: pytest.Item) -> float:
    """About how long a slow test takes; 0 for a quick one."""
    marker = item.get_closest_marker("slow")
    return float((*marker.args, 2.0)[0]) if marker else 0.0


def judge(fault: Fault, tree: Path, number: int, suite: Suite, seconds: float) -> Verdict:
    """Plant a fault in a tree, and run its tests.

    Args:
        number: another one for every fault, so that Python compiles the file again.
        seconds: about how long its tests take on a machine that does nothing else.
    """
    start = time.monotonic()
    tests = suite.belonging(fault, seconds)
    if not tests:
        return Verdict(fault)
    until = start + SLOWNESS * seconds
    source = (tree / fault.path).read_text(encoding="utf-8")
    verdict = Verdict(fault)
    with planted(tree / fault.path, fault.apply(source), number):
        # Most faults are noticed by the first tests, and the files of the others need not be read.
        for part in filter(None, (tests[:FIRST], tests[FIRST:])):
            verdict = ask(part, fault, tree, until, verdict.tests)
            if verdict.killer or verdict.how or verdict.is_cut:
                break
    return replace(verdict, seconds=time.monotonic() - start)


def ask(
    tests: Sequence[TestFunction], fault: Fault, tree: Path, until: float, before: int
) -> Verdict:
    """What some tests say of a fault that is planted; `before` tests have said nothing."""
    note = tree.with_suffix(".json")
    note.write_text("{}")
    watch = Watch(note, [test.name for test in tests], until)
    files = [*dict.fromkeys(test.file.path.as_posix() for test in tests)]
    code = run_tests(tree, files, tree.with_suffix(".log"), "-x", plugins=[watch])
    told = json.loads(note.read_text())
    killer, how = killer_of(code, told)
    count = before + told.get("tests", 0)
    return Verdict(fault, killer, how, count, is_cut=bool(told.get("is_cut")))


def killer_of(code: int, told: dict[str, str]) -> tuple[str, str]:
    """The test that noticed a fault, and how, from pytest's exit code and the notes of `Watch`."""
    if code in (PASSED, NOTHING_RAN) or (told.get("is_cut") and not told.get("failed")):
        return "", ""
    if told.get("failed"):
        return told["failed"], "failed"
    if code < 0 and told.get("running"):
        return told["running"], "hung" if code == -signal.SIGALRM else "crashed"
    if code == int(pytest.ExitCode.INTERRUPTED):
        return "the import", "not imported"
    return "", BROKEN


def judge_all(
    faults: Sequence[Fault], folder: Path, suite: Suite, seconds: float
) -> Iterator[Verdict]:
    """Yield verdicts as they come, of two faults at the same time, each in a copy of the tree."""
    trees = [copy_tree(folder / f"tree{number}") for number in range(PROCESSES)]
    waiting = deque(enumerate(faults, 1))
    running: dict[int, tuple[Path, Path, Fault]] = {}
    while waiting or running:
        while waiting and trees:
            number, fault = waiting.popleft()
            tree = trees.pop()
            answer = folder / f"{number}.json"
            running[start_judging(fault, tree, number, suite, seconds, answer)] = (
                tree,
                answer,
                fault,
            )
        process, _ = os.waitpid(-1, 0)
        if process not in running:
            continue
        tree, answer, fault = running.pop(process)
        trees.append(tree)
        yield Verdict(fault, **json.loads(answer.read_text()))


def start_judging(
    fault: Fault, tree: Path, number: int, suite: Suite, seconds: float, answer: Path
) -> int:
    """Judge a fault in a fork, which writes its verdict to a file; returns its process ID."""
    process = os.fork()
    if process:
        return process
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        verdict = dict(vars(judge(fault, tree, number, suite, seconds)))
        del verdict["fault"]
        answer.write_text(json.dumps(verdict))
    except BaseException:  # noqa: BLE001 - a fork may not return
        traceback.print_exc()
    finally:
        os._exit(0)


def copy_tree(tree: Path) -> Path:
    """Copy what git knows of the working tree, with changes that are not committed."""
    git = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(git, stdout=subprocess.PIPE, check=True, text=True).stdout.split("\n")
    for name in filter(None, names):
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target, follow_symlinks=False)
    return tree


def red_without(verdicts: Iterable[Verdict], folder: Path) -> set[str]:
    """The tests among the killers that fail without any fault, and so have killed nothing."""
    killers = sorted({verdict.killer for verdict in verdicts if verdict.how == "failed"})
    red = set()
    tree = folder / "tree0"
    log = folder / "log"
    if killers and run_tests(tree, killers, log) != PASSED:
        red = {test for test in killers if run_tests(tree, [test], log) != PASSED}
    return red


def main(count: int, seed: int, parts: Sequence[str], places: Sequence[str], seconds: float) -> int:
    """Judge random faults; 1 if too many survive.

    Args:
        parts: beginnings of paths; faults are planted in these files only. Empty means all.
        places: FILE:LINE of drawn faults; only these are judged. Empty means all.
        seconds: for the tests of one fault.
    """
    paths = [path for path in files_of_the_core(ROOT) if path.startswith(tuple(parts) or "")]
    faults = draw(ROOT, count, seed, paths)
    faults = [fault for fault in faults if not places or fault.place in places]
    counted = []
    for fault in faults:
        reason = why_equivalent(fault, (ROOT / fault.path).read_text(encoding="utf-8"))
        if reason is None:
            counted.append(fault)
        else:
            print(f"equivalent {fault.place}: {reason}", flush=True)

    import tests.tools.preload  # noqa: F401 - for the forks

    # A short name, since tests put sockets below it.
    with tempfile.TemporaryDirectory(prefix="m-") as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name  # for what faults leave behind
        verdicts = judge_soundly(counted, Path(name), seconds)
    judged = [verdict for verdict in verdicts if verdict.how != BROKEN]
    return conclude(seed, len(faults), judged)


def judge_soundly(faults: Sequence[Fault], folder: Path, seconds: float) -> list[Verdict]:
    """Judge faults; once more, without them, where the killers fail without any fault, too."""
    verdicts: list[Verdict] = []
    red: set[str] = set()
    for attempt in ("first", "again"):
        (folder / attempt).mkdir()
        waiting = [fault for fault in faults if fault not in [each.fault for each in verdicts]]
        for verdict in judge_all(waiting, folder / attempt, Suite(ROOT, red), seconds):
            print(line_of(verdict), flush=True)
            verdicts.append(verdict)
        red = red_without(verdicts, folder / attempt)
        for test in sorted(red):
            print(f"{test} fails without a fault, too")
        if not red:
            break
        verdicts = [verdict for verdict in verdicts if verdict.killer not in red]
    return verdicts


def line_of(verdict: Verdict) -> str:
    """One line about a fault."""
    fault = verdict.fault
    outcome = "SURVIVED"
    if verdict.killer:
        outcome = f"killed by {verdict.killer} ({verdict.how})"
    if verdict.how == BROKEN:
        outcome = "UNJUDGED, pytest has failed"
    cut = ", time is up" if verdict.is_cut else ""
    work = f"{verdict.tests} tests, {verdict.seconds:.0f} s{cut}"
    return f"{fault.place} {fault.operator}: {outcome}; {work}"


def conclude(seed: int, planted: int, verdicts: Sequence[Verdict]) -> int:
    """Print the survivors and the figures; 1 if too many survived."""
    survivors = [verdict for verdict in verdicts if not verdict.killer]
    for verdict in survivors:
        fault = verdict.fault
        print(f"\n{fault.place} ({fault.operator}, seed {seed})")
        print(*fault.difference((ROOT / fault.path).read_text(encoding="utf-8")), sep="\n")
    counted = len(verdicts)
    share = 100 * len(survivors) / max(counted, 1)
    print(
        f"\nseed {seed}: {planted} planted, {planted - counted} do not count, "
        f"{counted - len(survivors)} killed, {len(survivors)} survived ({share:.0f} %)"
    )
    return int(share > BAR)


if __name__ == "__main__":
    sys.exit("./scripts/mutations --random COUNT")
