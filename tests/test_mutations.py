"""The list of ./scripts/mutations fits the tree."""

from __future__ import annotations

from tests.mutations import ROOT, read_list


def test_every_mutation_has_its_text_and_its_tests() -> None:
    mutations = read_list()
    assert len(mutations) == len({each.name for each in mutations}) >= 60
    for mutation in mutations:
        changed = mutation.find().read_text(encoding="utf-8").replace(mutation.old, mutation.new)
        compile(changed, mutation.name, "exec")  # else its tests would fail for another reason than theirs
        for test in mutation.tests:
            file, *names = test.split("::")
            content = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert not names or f"def {names[-1]}(" in content, mutation.name
