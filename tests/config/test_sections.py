"""The places of options on the page and in the wizard."""

from __future__ import annotations

import copy

import pytest

from simpletuner.config import sections
from simpletuner.config.schema import technique_groups


@pytest.mark.parametrize(
    ("title", "place"), [("CREPA", "training/loss_functions"), ("Tracking", "basic/run")]
)
def test_new_groups_join_the_section_of_their_kind(
    monkeypatch: pytest.MonkeyPatch, title: str, place: str
) -> None:
    table = copy.deepcopy(sections.TABLE)
    for section in table["sections"]:
        section["groups"] = [name for name in section.get("groups", ()) if name != title]
    monkeypatch.setattr(sections, "TABLE", table)

    (section,) = [section for section in sections._read_sections() if title in section.groups]

    assert section.id == place


def test_every_technique_declares_one_group() -> None:
    modules = [group.__module__ for group in technique_groups()]
    assert len({*modules}) == len(modules)
