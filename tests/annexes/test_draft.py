"""A configuration in the making, as the wizard and a page see it: judged at any time, never with an
exception.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.draft import Draft
from simpletuner.config.option import options_of
from simpletuner.config.schema import all_options, family_groups
from simpletuner.errors import Problem
from simpletuner.models.registry import FAMILIES
from tests.planning.test_precision import without

JUNK: list[Any] = ["", "x", "~nouser/x", -1, float("nan"), ["a", 3], {"a": [1]}]


def test_nothing_at_all_is_a_draft(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "config.json")
    assert draft.values.keys() == {"model_family", "model_type"}
    assert all(problem.where for problem in draft.judgement.problems)


def test_problems_stand_under_their_keys(tmp_path: Path) -> None:
    values = {
        "lora_rank": "many",
        "learning_rte": 1,
        "validation_resolution": "1",
        "model_flavour": "t2i",
    }
    found: dict[str, list[Problem]] = {}
    for problem in dict.fromkeys(Draft(tmp_path / "config.json", values).judgement.problems):
        found.setdefault(problem.where, []).append(problem)
    assert values.keys() <= found.keys()
    assert all(len(found[key]) == 1 for key in values)
    assert "learning_rate" in found["learning_rte"][0].message
    assert not any("()" in problem.message for problems in found.values() for problem in problems)


def test_a_draft_stands_for_its_file(tmp_path: Path) -> None:
    """What lies beside config.json counts as it will in training, and has problems of its own."""
    (tmp_path / "config.env").write_text(
        "LORA_RANK=4\nSEED=7\nTRAINER_EXTRA_ARGS=--seed=9\nbroken\n"
    )
    draft = Draft(tmp_path / "config.json", {"lora_rank": 8})
    assert (draft.effective("lora_rank"), draft.effective("seed")) == (8, 9)
    assert not any("config.env" in problem.where for problem in draft.judgement.problems)


def test_a_missing_package_is_reported_at_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "bitsandbytes")
    told = Draft(tmp_path / "config.json").weigh(
        "base_model_precision", {"base_model_precision": "nf4-bnb"}
    )
    assert ["bitsandbytes" in each.message for each in told if each.fatal] == [True]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_of_any_key_raises(tmp_path: Path, family: str) -> None:
    """Of each key, a family tries its share of the values: all pairs of key, value and family are
    met. Those of the families' keys depend on both, so they are all tried."""
    turn = list(FAMILIES).index(family)
    of_families = options_of(*family_groups())
    for number, key in enumerate(all_options()):
        for value in (
            JUNK if key in of_families else JUNK[(turn + number) % len(FAMILIES) :: len(FAMILIES)]
        ):
            judged = Draft(tmp_path / "config.json", {"model_family": family, key: value}).judgement
            assert all(problem.message for problem in judged.problems), key
