"""The shell of the page: its places, what they share, and the theme."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.serve import create_app
from tests.annexes.page.new.test_start_page import started
from tests.annexes.page.page import go, opened
from tests.annexes.page.run_folder import RunFolder, every_run
from tests.annexes.page.runs.test_runs import STEPS, tell
from tests.tools.workspace import Workspace

__all__ = ["started"]
expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright").expect


def first_place(folder: Path, run: Path | None = None) -> str:
    """The anchor at which the page opens."""
    html = TestClient(create_app(Project(folder, run=run))).get("/").text
    return html.partition('data-first="')[2].partition('"')[0]


def test_the_page_of_an_empty_project_opens_on_new(tmp_path: Path) -> None:
    assert first_place(tmp_path) == "start"


@pytest.mark.parametrize("kind", [*every_run()], ids=lambda kind: kind.name)
def test_the_page_of_a_project_with_a_run_opens_on_runs(tmp_path: Path, kind: RunFolder) -> None:
    kind.write(tmp_path)

    assert first_place(tmp_path) == "run"


def test_the_page_of_a_config_that_never_ran_opens_on_runs(tmp_path: Path) -> None:
    (tmp_path / "config" / "cats").mkdir(parents=True)
    (tmp_path / "config" / "cats" / "config.json").write_text("{}")

    assert first_place(tmp_path) == "run"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Two configs with a run each: `config` in output, `second` in there."""
    made = Workspace.create(tmp_path.resolve() / "project", tmp_path, pictures=2)
    monkeypatch.chdir(made.folder)
    second = made.path("config/second/config.json")
    second.parent.mkdir()
    text = made.path("config/config.json").read_text()
    second.write_text(text.replace('"output"', '"there"'))
    for name in ("output", "there"):
        made.path(name).mkdir()
        tell(made.path(name), *STEPS)
    return made


@pytest.fixture
def page(browser: Any, project: Workspace) -> Iterator[Any]:
    with opened(browser, project.folder) as page:
        yield page


@pytest.mark.slow(6)
def test_runs_and_settings_show_the_same_config(page: Any) -> None:
    title = page.get_by_role("heading", level=1)
    config = page.locator("#config")

    page.locator(".run-list a", has_text="there").click()
    expect(title).to_have_text("there")
    go(page, "Settings")
    expect(config).to_have_value("second")

    config.select_option("config")
    go(page, "Runs")
    expect(title).to_have_text("output")

    go(page, "Settings")
    page.get_by_label("Batch Size", exact=True).fill("3")
    go(page, "Runs")
    page.locator(".run-list a", has_text="there").click()
    expect(title).to_have_text("there")
    go(page, "Settings")
    expect(config).to_have_value("config")  # with what is not saved


@pytest.mark.slow(6)
def test_start_in_settings_saves_and_shows_the_run(
    browser: Any, project: Workspace, started: list[list[str]]
) -> None:
    with opened(browser, project.folder, "?config=second#basic") as page:
        page.get_by_label("Batch Size", exact=True).fill("3")
        page.get_by_role("button", name="Start", exact=True).click()
        dialog = page.get_by_role("dialog", name="Start this config?")
        expect(dialog).to_contain_text("Its run stands at step 3 of 9")
        dialog.get_by_role("button", name="Start", exact=True).click()
        expect(page.get_by_role("heading", level=1)).to_have_text("there")
    assert '"train_batch_size": 3' in project.path("config/second/config.json").read_text()
    assert started == [["train", f"--config={project.path('config/second/config.json')}"]]


@pytest.mark.slow(6)
def test_the_theme_is_remembered(page: Any) -> None:
    page.get_by_label("Theme").select_option("dark")
    page.reload()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Theme").select_option("light")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert dark == "rgb(19, 19, 22)"
    assert light == "rgb(248, 247, 244)"


@pytest.mark.slow(6)
def test_start_in_settings_names_what_stands_in_the_way(
    browser: Any, project: Workspace, started: list[list[str]]
) -> None:
    def slow_answer(route: Any) -> None:
        time.sleep(0.4)
        route.continue_()

    with opened(browser, project.folder, "?config=second#basic") as page:
        # Saving checks the form, and so does the edit, a moment later: Start waits for the last.
        page.route("**/api/training/validate", slow_answer)
        page.get_by_label("Batch Size", exact=True).fill("two")
        page.get_by_role("button", name="Start", exact=True).click()
        expect(page.locator("#saved")).to_contain_text("Not started: Batch Size")
    assert started == []
