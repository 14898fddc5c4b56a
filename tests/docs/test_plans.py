"""The plans that the docs show are today's; `python -m tests.docs.plans` writes them anew."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.plans import DOCS, SAMPLE, SAMPLED, renewed, write_files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    write_files(folder)
    return folder


@pytest.mark.parametrize("page", [*SAMPLED, "DISTRIBUTED"])
def test_plans_are_those_of_today(page: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    assert renewed(page).splitlines() == (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()


def test_every_sample_of_an_estimate_is_regenerated() -> None:
    """A table of phases or ways that no command stands above could go stale."""
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert bool(SAMPLE.search(text)) == (page in {DOCS / f"{name}.md" for name in SAMPLED}), page
        assert not re.search(r"^  (peak memory|ways to train) ", SAMPLE.sub("", text), re.MULTILINE), page
