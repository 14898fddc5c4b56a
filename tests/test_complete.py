"""What is added to the program has all of its parts, in every room; `python -m tests.complete` says what is missing."""

from __future__ import annotations

import pytest

from simpletuner.planning.techniques.spec import TechniqueSpec
from tests import complete
from tests.training import lockstep


class NewSpec(TechniqueSpec):
    name = "new"


def test_nothing_is_missing() -> None:
    assert complete.lacking() == []


def test_all_that_a_new_technique_lacks_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "SPECS", (*complete.SPECS, NewSpec))

    missing = [*complete.check_techniques()]

    assert len(missing) == 5
    for part in ("class in TECHNIQUES", "NEUTRAL", "settings in TECHNIQUES", "TOGETHER", "DATASET_KEYS"):
        assert any(part in sentence for sentence in missing), part


def test_settings_without_a_comparison_are_missing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {name: {**case, "names": case["names"][:-1]} for name, case in lockstep.TOGETHER.items()}
    monkeypatch.setattr(lockstep, "TOGETHER", without)

    missing = [*complete.check_techniques()]

    assert [sentence.split(" has no ")[0] for sentence in missing] == ["'slider'", "'tread'"]
    assert all("TOGETHER" in sentence for sentence in missing)
