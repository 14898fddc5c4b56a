"""`python -m tests.tools.complete` lists what a new part of the program lacks, in every room."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from simpletuner.config.option import Group, TechniqueGroup, common
from simpletuner.config.remote import SOURCES, Source
from simpletuner.config.types import Flag
from simpletuner.models.registry import FAMILIES
from simpletuner.planning.techniques.spec import TechniqueSpec
from tests.models.fourth import FOURTH
from tests.tools import complete


class NewKeys(TechniqueGroup):
    """New"""

    new_key: Flag = common(False)
    """A key."""


class NewSpec(TechniqueSpec):
    name = "new"
    trains = "tests.techniques.facing:Facing"
    keys = NewKeys


def test_every_extension_is_complete() -> None:
    assert complete.lacking() == []


def test_all_gaps_of_a_new_technique_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "SPECS", (*complete.SPECS, NewSpec))

    missing = [*complete.check_techniques()]

    assert missing == [
        "'new' has no case in CASES (tests/techniques/cases.py)",
        "'new' has no test of its own (tests/techniques/test_facing.py)",
        "'new' has no file below simpletuner/config/techniques/ that declares NewKeys",
        "'new' has no page in docs/ that names new_key",
    ]


def test_a_technique_without_a_spec_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "SPECS", complete.SPECS[:-1])

    missing = [*complete.check_techniques()]

    place = "in SPECS (simpletuner/planning/techniques/table.py)"
    assert missing == [
        f"Preservation is trained by no spec {place}",
        f"PreservationConfig has no spec {place}",
        "'preservation' in CASES (tests/techniques/cases.py) is not a technique",
    ]


def test_a_case_without_a_comparison_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        complete.CASES, "tread", replace(complete.CASES["tread"], neutral=[], runs=())
    )

    missing = [*complete.check_techniques()]

    assert [sentence.partition(" in its case")[0] for sentence in missing] == [
        "'tread' has no neutral settings",
        "'tread' has no run",
    ]


class TarKeys(Group):
    """type tars: tar files."""

    tar_folder: Flag = common(False)
    """A folder."""


def test_all_gaps_of_a_new_source_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tars = Source(
        TarKeys, lister="simpletuner.annexes.remote.tars:list_tars", required=("tar_folder",)
    )
    monkeypatch.setattr(complete, "SOURCES", {**SOURCES, "tars": tars})

    missing = [*complete.check_sources()]

    assert missing == [
        "'tars' is in only one of SourceName and SOURCES (simpletuner/config/remote.py)",
        "'tars' has no row in docs/DATALOADER.md",
        "'tars' has no lister: 'simpletuner.annexes.remote.tars:list_tars' cannot be imported",
        "'tars' has keys that no dataset has: TarKeys is not a base of RemoteKeys",
        "tar_folder of 'tars' has no row in docs/DATALOADER.md",
    ]


def test_all_gaps_of_a_new_family_are_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, FOURTH.name, FOURTH)

    missing = [*complete.check_families()]

    assert missing == [
        "'fourth' has no small SanaTransformer2DModel in SMALL (benchmarks/models.py)",
        "'fourth' has no tests/models/cost.json, which `python -m benchmarks.cost_table "
        "--only fourth` measures",
        "'fourth' has no page below docs/quickstart/",
        "'fourth' has no section in docs/FIDELITY.md, and no test in tests/fidelity/",
        "'fourth' has no example below simpletuner/examples/",
    ]


def test_a_subscriber_is_found_by_its_name() -> None:
    tree = ast.parse('events.subscribe("The new one", count)\nevents.subscribe(name, count)')
    assert [*complete.subscribed(tree)] == ["The new one"]


def test_a_tracker_without_a_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(complete.TRACKERS, "prometheus", complete.TRACKERS["wandb"])

    missing = [*complete.check_trackers()]

    assert missing == [
        "'prometheus' has no package, or None, in PACKAGES (simpletuner/config/trackers.py)",
        "'prometheus' has no mention in the help of report_to (simpletuner/config/trackers.py)",
    ]
