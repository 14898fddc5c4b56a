"""The list of runs in Chromium: two runs compared; one archived, brought back and deleted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.page.runs.control import run_id
from tests.annexes.page.page import opened
from tests.annexes.page.run_folder import RunFolder

pytestmark = pytest.mark.slow(6)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
expect = sync_api.expect


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


def test_two_runs_are_compared_and_one_is_archived_brought_back_and_deleted(
    browser: Any, folder: Path
) -> None:
    kept = RunFolder(True, "result", False, "done").write(folder / "output")
    gone = RunFolder(False, "checkpoint", False, "interrupted").write(folder / "output")
    with opened(browser, folder, f"?run={run_id(gone)}#run") as page:
        for run in (kept, gone):
            page.get_by_label(f"Choose {run.name}").check()
        page.get_by_role("button", name="Compare", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("2 runs compared")
        expect(page.locator(".chart .key-line").first).to_contain_text(kept.name)
        page.get_by_role("button", name=f"Enlarge validation of {kept.name}").click()
        expect(page.get_by_role("dialog")).to_contain_text(f"{kept.name}, step 3")
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Runs").click()

        page.get_by_label(f"Choose {gone.name}").check()
        page.get_by_role("button", name="Archive", exact=True).click()
        expect(page.locator(".run-note")).to_contain_text(f"Archived as output/archive/{gone.name}")
        page.get_by_role("button", name="Undo").click()
        expect(page.locator(".run-note")).to_have_text(f"output/{gone.name} is back.")
        assert (gone / "checkpoint-2").is_dir()

        page.get_by_label(f"Choose {gone.name}").check()
        page.get_by_role("button", name="Archive", exact=True).click()
        page.get_by_text("Archived: 1").click()
        page.get_by_role("button", name=f"Delete {gone.name}").click()
        dialog = page.get_by_role("dialog", name=f"Delete {gone.name}?")
        expect(dialog).to_contain_text("1 checkpoint, so the run cannot be continued")
        expect(dialog.get_by_role("button", name="Delete for good")).to_be_disabled()
        dialog.get_by_role("checkbox").check()
        dialog.get_by_role("button", name="Delete for good").click()
        expect(page.locator(".run-note")).to_have_text(re.compile(r"Deleted: \d+ files\."))
        expect(page.locator(".run-list a", has_text=kept.name)).to_be_visible()
        expect(page.locator(".run-list .archived")).to_have_count(0)
    assert not (folder / "output/archive").exists()
    assert kept.is_dir()


def test_a_search_shows_matching_runs_only(browser: Any, folder: Path) -> None:
    # Letters, since a digit may be in the time of every run.
    for name in "abcdex":
        RunFolder(False, "nothing", False, "done").write(folder / f"set-{name}").rename(
            folder / f"cats-{name}"
        )
    with opened(browser, folder, "#run") as page:
        page.get_by_label("Search runs").fill("cats x")
        expect(page.locator(".run-rows li:visible")).to_have_count(1)
        page.get_by_label("Search runs").fill("")
        expect(page.locator(".run-rows li:visible")).to_have_count(6)
