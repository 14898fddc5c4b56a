"""The list of ./scripts/mutations fits the tree."""

from __future__ import annotations

from tests.mutations import ROOT, read_list


def test_every_mutation_has_its_text_and_its_tests() -> None:
    mutations = read_list()
    assert len(mutations) == len({each.name for each in mutations}) >= 60
    for mutation in mutations:
        assert mutation.find()
        for test in mutation.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / "tests" / file).read_text() or not name, mutation.name
