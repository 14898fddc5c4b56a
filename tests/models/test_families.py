"""The contract of a family, for those in the registry, and for one that only the tests have."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from benchmarks.models import SMALL
from simpletuner.models.registry import FAMILIES
from simpletuner.models.spec import FamilySpec
from tests.models.contract import CONTRACT, Check
from tests.models.fourth import FOURTH, small
from tests.tools.cases import first_of


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("spec", FAMILIES.values(), ids=[*FAMILIES])
def test_every_family_keeps_the_contract(spec: FamilySpec, check: Check) -> None:
    check(spec)


@pytest.fixture
def fourth() -> Iterator[FamilySpec]:
    rows = {FOURTH.cost.transformer_class: small}
    with mock.patch.dict(FAMILIES, {FOURTH.name: FOURTH}), mock.patch.dict(SMALL, rows):
        yield FOURTH


# To measure the cost of a family without a table takes long.
@pytest.mark.slow(1)
@pytest.mark.parametrize("check", first_of(CONTRACT, 5), ids=lambda check: check.__name__)
def test_a_new_family_needs_only_a_spec_and_an_adapter(fourth: FamilySpec, check: Check) -> None:
    """The cost table is measured, not written by hand."""
    check(fourth)
