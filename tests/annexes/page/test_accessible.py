"""axe-core finds nothing serious or moderate on any page, narrow and wide, light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest

from simpletuner.reporting.events import StateChanged
from tests.annexes.page.page import opened
from tests.annexes.page.test_run_page import preview
from tests.annexes.page.test_runs import STEPS, tell
from tests.workspace import Workspace

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytest.importorskip("axe_playwright_python", reason="needs axe-core")
expect = sync_api.expect

WIDTHS = (400, 1400)
ASK = """
    async (rules) => {
        const { violations } = await axe.run(document, { resultTypes: ["violations"], ...rules });
        const told = ({ html, any }) => `${html.slice(0, 160)} ${any[0]?.message ?? ""}`;
        return violations.filter(({ impact }) => impact !== "minor")
            .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 5).map(told).join(" | ")}`);
    }
"""


@pytest.fixture(scope="module")
def axe() -> str:
    return files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")


@pytest.fixture
def page(browser: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    workspace.write_config(my_own_key=1, plan_device_memory_gb=12, train_batch_size="two")
    monkeypatch.chdir(workspace.folder)
    with opened(browser, workspace.folder.resolve()) as page:
        yield page


def complaints(page: Any, axe: str) -> str:
    """What axe says of the page as it is, at both widths and in both colour schemes."""
    page.evaluate(axe)
    found = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
            # Only contrast depends on the colours.
            rules = {} if scheme == "light" else {"runOnly": ["color-contrast"]}
            found += [f"{width} {scheme} {each}" for each in page.evaluate(ASK, rules)]
    return "\n".join(found)


@pytest.mark.parametrize("tab", ["basic", "training", "dataset"])
def test_the_form_is_accessible(page: Any, axe: str, tab: str) -> None:
    page.goto(page.url.partition("#")[0] + f"#{tab}")
    expect(page.locator("[data-key=train_batch_size] .bad")).to_contain_text("is not a whole number")
    expect(page.locator("#verdict")).not_to_have_text("")
    assert complaints(page, axe) == ""


def test_the_start_card_is_accessible(page: Any, workspace: Workspace, axe: str) -> None:
    page.goto(page.url.partition("#")[0] + "#start")
    page.locator("#drop-files").set_input_files([*workspace.path("datasets/pictures").glob("*.png"), __file__])
    page.locator("#start-skipped summary").click()
    expect(page.locator("#start-models .dim")).not_to_have_text("")
    assert complaints(page, axe) == ""


def test_another_card_and_a_remedy_are_accessible(page: Any, workspace: Workspace, axe: str) -> None:
    workspace.write_config(my_own_key=None, train_batch_size=2, pretrained_model_name_or_path=None)
    page.reload()
    expect(page.get_by_role("button", name="Apply")).to_be_visible()
    page.get_by_label("Plan for a card").fill("4")
    expect(page.locator("#plan.supposed")).to_be_visible()
    assert complaints(page, axe) == ""


def test_search_and_dialogs_are_accessible(page: Any, axe: str) -> None:
    page.locator("#search").fill("vram")
    expect(page.locator("#f-offload")).to_be_visible()
    assert complaints(page, axe) == ""
    page.get_by_role("button", name="New", exact=True).click()
    expect(page.get_by_role("dialog", name="New config")).to_be_visible()
    assert complaints(page, axe) == ""


def test_files_and_captions_are_accessible(page: Any, workspace: Workspace, axe: str) -> None:
    workspace.path("datasets/pictures/p1.txt").unlink()
    page.goto(page.url.partition("#")[0] + "#dataset/files/pictures")
    dialog = page.get_by_role("dialog", name="pictures")
    dialog.get_by_text("Change or write captions").click()
    dialog.get_by_label("Find in all captions").fill("picture")
    dialog.get_by_role("button", name="Preview").click()
    dialog.get_by_role("button", name="Leave out p0.png").click()
    expect(dialog.get_by_role("button", name="Take back p0.png")).to_be_visible()
    expect(dialog.locator(".changes")).to_contain_text("captions would change")
    assert complaints(page, axe) == ""


def test_runs_are_accessible(page: Any, workspace: Workspace, axe: str) -> None:
    output = workspace.path("output").resolve()
    output.mkdir()
    tell(output, *STEPS, StateChanged("failed", 3, 9, "The disk is full."))
    preview(output, *((step, name) for step in (0, 3) for name in ("validation", "bird")))
    page.goto(page.url.partition("#")[0] + "#run")
    expect(page.locator("figure.chart svg").first).to_be_visible()
    expect(page.locator("#comparison .compare")).to_have_count(2)
    assert complaints(page, axe) == ""
    page.locator("button.preview").first.click()
    expect(page.locator("#viewer")).to_be_visible()
    assert complaints(page, axe) == ""


def test_documentation_and_datasets_are_accessible(page: Any, workspace: Workspace, axe: str) -> None:
    workspace.write_config(my_own_key=None, plan_device_memory_gb=None, train_batch_size=2)
    for path in ("docs/", "docs/TUTORIAL.md", "dataset?config=config"):
        page.goto(page.url.partition("/")[0] + f"//{page.url.split('/')[2]}/{path}")
        assert complaints(page, axe) == "", path
