"""An unfinished configuration, as the wizard and the page have it, can be judged at any time."""

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


def test_empty_configuration_is_a_valid_draft(tmp_path: Path) -> None:
    draft = Draft(tmp_path / "config.json")

    assert draft.values.keys() == {"model_family", "model_type"}
    assert all(problem.where for problem in draft.judgement.problems)


def test_problems_are_listed_under_their_keys(tmp_path: Path) -> None:
    values = {
        "lora_rank": "many",
        "learning_rte": 1,
        "validation_resolution": "1",
        "model_flavour": "t2i",
    }

    by_key: dict[str, list[Problem]] = {}
    for problem in dict.fromkeys(Draft(tmp_path / "config.json", values).judgement.problems):
        by_key.setdefault(problem.where, []).append(problem)

    assert values.keys() <= by_key.keys()
    assert all(len(by_key[key]) == 1 for key in values)
    assert "learning_rate" in by_key["learning_rte"][0].message
    assert not any("()" in problem.message for problems in by_key.values() for problem in problems)


def test_draft_reads_the_environment_file_beside_its_config(tmp_path: Path) -> None:
    """As in training. Problems of that file are reported elsewhere, not in the draft."""
    (tmp_path / "config.env").write_text(
        "LORA_RANK=4\nSEED=7\nTRAINER_EXTRA_ARGS=--seed=9\nbroken\n"
    )

    draft = Draft(tmp_path / "config.json", {"lora_rank": 8})

    assert (draft.effective("lora_rank"), draft.effective("seed")) == (8, 9)
    assert not any("config.env" in problem.where for problem in draft.judgement.problems)


def test_missing_package_is_reported_for_the_value_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "bitsandbytes")

    problems = Draft(tmp_path / "config.json").weigh(
        "base_model_precision", {"base_model_precision": "nf4-bnb"}
    )

    (fatal,) = [problem for problem in problems if problem.fatal]
    assert "bitsandbytes" in fatal.message


@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_of_any_key_makes_the_draft_raise(tmp_path: Path, family: str) -> None:
    """The families share the values of a common key: each value is tried with one of them. What a
    key of a family means depends on the family, so each family tries all values.
    """
    turn = list(FAMILIES).index(family)
    keys_of_families = options_of(*family_groups())
    for number, key in enumerate(all_options()):
        values = JUNK
        if key not in keys_of_families:
            values = JUNK[(turn + number) % len(FAMILIES) :: len(FAMILIES)]
        for value in values:
            draft = Draft(tmp_path / "config.json", {"model_family": family, key: value})
            assert all(problem.message for problem in draft.judgement.problems), key
