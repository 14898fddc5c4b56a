"""axe-core finds nothing serious or moderate on any page, narrow and wide, light and dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.resources import files
from itertools import product
from typing import Any

import pytest

from simpletuner.annexes.page.runs.queue import JOBS, QUEUE_FILE, Job
from simpletuner.headers import with_metadata
from simpletuner.reporting.events import StateChanged
from simpletuner.weights.lora_names import LORA_FILE, STEP_NOTE
from tests.annexes.page.page import opened
from tests.annexes.page.runs.test_run_page import preview
from tests.annexes.page.runs.test_runs import STEPS, tell
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow(8)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
pytest.importorskip("axe_playwright_python", reason="needs axe-core")
expect = sync_api.expect

AXE = files("axe_playwright_python").joinpath("axe.min.js")
WIDTHS = (1400, 400)
SEEN: list[str] = []  # looks of texts that were measured
# All rules are asked once a page. Of the rest, what scrolls depends on the width, and contrast on
# the colours: on a text's own, its size and weight, and what is painted behind it. Each such look
# is measured once.
ASK = """
    async ({ isWhole, isNarrow, seen }) => {
        const styles = new Map(), looks = new Map(), told = [];
        const behind = (node) => {
            if (!node) return "";
            if (!styles.has(node)) {
                const { backgroundColor, backgroundImage, opacity } = getComputedStyle(node);
                const paint = `${backgroundColor} ${backgroundImage} ${opacity}`;
                const own = paint.replace("rgba(0, 0, 0, 0) none 1", "");
                styles.set(node, own + behind(node.parentElement));
            }
            return styles.get(node);
        };
        const isText = (node) => node.matches("input, select, textarea, meter") ||
            [...node.childNodes].some(
                (child) => child.nodeType === Node.TEXT_NODE && child.data.trim());
        for (const node of document.querySelectorAll("body *")) {
            if (!isText(node) || !node.checkVisibility()) continue;
            const { color, fontSize, fontWeight } = getComputedStyle(node);
            const control = node.control ?? node.closest("button, fieldset") ?? node;
            const isExempt = Boolean(control.disabled);
            looks.set(`${color} ${fontSize} ${fontWeight} ${isExempt} ${behind(node)}`, node);
        }
        const fresh = [...looks].filter(([look]) => !seen.includes(look));
        const ask = async (where, ...rules) => {
            const runOnly = rules.length ? { runOnly: rules } : {};
            const options = { resultTypes: ["violations"], ...runOnly };
            const { violations } = await axe.run(where, options);
            const line = ({ html, any }) => `${html.slice(0, 160)} ${any[0]?.message ?? ""}`;
            told.push(...violations.filter(({ impact }) => impact !== "minor")
                .map(({ id, nodes }) => `${id}: ${nodes.slice(0, 5).map(line).join(" | ")}`));
        };
        if (isWhole) await ask(document);
        else if (fresh.length) await ask(fresh.map(([, node]) => node), "color-contrast");
        if (isNarrow) await ask(document, "scrollable-region-focusable");
        return { told, fresh: fresh.map(([look]) => look) };
    }
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Two configs: one with problems, one that does not fit a card of 12 GB."""
    folder = tmp_path_factory.mktemp("accessible").resolve()
    made = Workspace.create(folder / "project", folder)
    made.write_config(pretrained_model_name_or_path=None)
    shutil.copytree(
        made.path("config"), made.path("config/large"), ignore=shutil.ignore_patterns("multi*")
    )
    made.write_config(my_own_key=1, train_batch_size="two")
    return made


@pytest.fixture(scope="module")
def page(browser: Any, workspace: Workspace) -> Iterator[Any]:
    """The page, on which all tests of this module go on."""
    with workspace.inside(), opened(browser, workspace.folder, "#basic") as page:
        yield page


def go(page: Any, address: str) -> None:
    """Open another part of the page, as after a start; only another config loads it anew."""
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    page.evaluate("document.querySelector('dialog[open]')?.close()")
    page.goto(f"http://{page.url.split('/')[2]}/{address}")


def complaints(page: Any) -> str:
    """What axe says of the page as it is, at both widths and in both colour schemes."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE.read_text(encoding="utf-8"))
    found = []
    for width, scheme in product(WIDTHS, ("light", "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        is_first = (width, scheme) == (WIDTHS[0], "light")
        is_narrow = (width, scheme) == (WIDTHS[1], "light")
        answer = page.evaluate(ASK, {"isWhole": is_first, "isNarrow": is_narrow, "seen": SEEN})
        found += [f"{width} {scheme} {each}" for each in answer["told"]]
        SEEN.extend(answer["fresh"])
    return "\n".join(found)


def test_the_form_is_accessible(page: Any) -> None:
    for tab in ("basic", "training", "dataset"):
        go(page, f"?config=config#{tab}")
        expect(page.locator("[data-key=train_batch_size] .bad")).to_contain_text(
            "is not a whole number"
        )
        expect(page.locator("#verdict")).not_to_have_text("")
        assert complaints(page) == "", tab


def test_the_list_of_prompts_is_accessible(page: Any) -> None:
    go(page, "?config=config#validation")
    page.get_by_role("button", name="Edit the prompts").click()
    dialog = page.get_by_role("dialog", name="Preview prompts of config")
    dialog.get_by_role("button", name="Add a prompt").click()
    dialog.get_by_label("Seed").fill("x")
    dialog.get_by_role("button", name="Save").click()
    expect(dialog.locator(".faults .bad").first).to_be_visible()

    assert complaints(page) == ""


def test_the_start_card_is_accessible(page: Any, workspace: Workspace) -> None:
    go(page, "?config=config#start")
    expect(page.locator("#drop")).to_be_visible()  # before, nobody can choose files
    page.locator("#drop-files").set_input_files(
        [*workspace.path("datasets/pictures").glob("*.png"), __file__]
    )
    page.locator("#start-skipped summary").click()
    expect(page.locator("#start-models .dim").last).to_contain_text("about")
    assert complaints(page) == ""


def test_search_and_dialogs_are_accessible(page: Any) -> None:
    go(page, "?config=config#basic")
    page.locator("#search").fill("vram")
    expect(page.locator("#f-offload")).to_be_visible()
    assert complaints(page) == ""
    page.get_by_role("button", name="New config").click()
    expect(page.get_by_role("dialog", name="New config")).to_be_visible()
    assert complaints(page) == ""


def test_another_card_and_a_remedy_are_accessible(page: Any) -> None:
    go(page, "?config=large#basic")
    page.get_by_label("Plan for a card").fill("12")
    expect(page.get_by_role("button", name="Apply").first).to_be_visible()
    expect(page.locator("#plan.supposed")).to_be_visible()
    assert complaints(page) == ""


def test_files_and_captions_are_accessible(page: Any, workspace: Workspace) -> None:
    workspace.path("datasets/pictures/p1.txt").unlink()
    go(page, "?config=config#dataset/files/pictures")
    dialog = page.get_by_role("dialog", name="pictures")
    dialog.get_by_text("Change or write many captions").click()
    dialog.get_by_label("Find in all captions").fill("picture")
    dialog.get_by_role("button", name="Preview").click()
    dialog.get_by_role("button", name="Leave out p0.png").click()
    expect(dialog.get_by_role("button", name="Take back p0.png")).to_be_visible()
    expect(dialog.locator(".changes")).to_contain_text("captions would change")
    assert complaints(page) == ""
    dialog.get_by_role("button", name="Mask of p0.png").click()
    page.get_by_role("button", name="Learn nothing").click()
    expect(page.locator("#painter .bad")).to_contain_text("cannot be saved")
    assert complaints(page) == ""
    page.evaluate("document.querySelector('#painter').close()")


def test_runs_are_accessible(page: Any, workspace: Workspace) -> None:
    output = workspace.path("output")
    output.mkdir()
    tell(output, *STEPS, StateChanged("failed", 3, 9, "The disk is full."))
    preview(output, *((step, name) for step in (0, 3) for name in ("validation", "bird")))
    blob = len(b"{}").to_bytes(8, "little") + b"{}"
    (output / LORA_FILE).write_bytes(with_metadata(blob, {STEP_NOTE: "3"}))
    # One that waits for ever, since its config is gone, after two that have ended.
    jobs = [
        Job(state, "train", str(output), "gone", state=state)
        for state in ("completed", "error", "waiting")
    ]
    workspace.path(QUEUE_FILE).write_bytes(JOBS.dump_json(jobs))
    go(page, "?config=config#run")
    page.get_by_text("Sample with your own prompts").click()
    expect(page.locator(".queue li").first).to_be_visible()
    expect(page.locator("figure.chart svg").first).to_be_visible()
    expect(page.locator(".shots.main .beside")).to_have_count(2)
    assert complaints(page) == ""
    page.locator("button.preview").first.click()
    expect(page.locator("#viewer")).to_be_visible()
    assert complaints(page) == ""


def test_documentation_and_datasets_are_accessible(page: Any) -> None:
    for path in ("docs/", "docs/?q=memory", "docs/TUTORIAL.md", "dataset?config=large"):
        go(page, path)
        assert complaints(page) == "", path
