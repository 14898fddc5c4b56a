"""The list of ./scripts/mutations fits the tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import mutations
from tests.tools.mutations import ROOT, Mutation, judge, read_list


def test_every_mutation_has_its_text_and_its_tests() -> None:
    mutations = read_list()
    assert len(mutations) == len({mutation.name for mutation in mutations}) >= 60
    for mutation in mutations:
        changed = mutation.apply(mutation.find().read_text(encoding="utf-8"))
        # Tests of code that does not compile would fail for that reason.
        compile(changed, mutation.name, "exec")
        for test in mutation.tests:
            file, *names = test.split("::")
            content = (ROOT / file).read_text(encoding="utf-8")
            assert not names or f"def {names[-1]}(" in content, mutation.name


def test_the_layout_of_the_source_does_not_count() -> None:
    mutation = Mutation("name", "room", "f(first, [second]) + 1", "0", ())

    assert mutation.apply("x = f(\n    first,\n    [second],\n) + 1\n") == "x = 0\n"
    assert mutation.apply("x = f(first, [third]) + 1\n") == "x = f(first, [third]) + 1\n"


def test_one_unusable_mutation_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "code.py").write_text("x = 1\n")
    listed = [Mutation(name, "room", "x = 1", "x = 2", ("test.py",)) for name in "abcde"]
    # Exit codes of pytest: without the change and, if that is 0, with it.
    codes = iter([4, 1, 0, 2, 0, 1, 0, 0])
    monkeypatch.setattr(mutations, "run_tests", lambda *given: next(codes))

    outcomes = [outcome for _, outcome, _ in judge(listed, tmp_path, tmp_path / "log", sound=False)]

    assert outcomes == [
        "UNCOLLECTED without it",
        "RED without it",
        "UNCOLLECTED",
        "killed",
        "SURVIVED",
    ]
    assert (tmp_path / "room" / "code.py").read_text() == "x = 1\n"
