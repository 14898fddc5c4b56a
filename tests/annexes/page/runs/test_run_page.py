"""The pane "Run" in Chromium: a run from its start to its last preview, stopped, killed and
continued.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from simpletuner.annexes.page import serve
from simpletuner.annexes.page.guard import Access
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.serve import listen, page_of_run
from simpletuner.annexes.runs.run import Run
from simpletuner.data.clip_writer import write_mp4
from simpletuner.reporting.events import EventStream, MediaRendered, StateChanged
from simpletuner.reporting.metrics import MEDIA_FILE, REPORT_FILE, MediaFile, MediaRecord
from tests.annexes.page.page import ending_runs, opened, serving, tab
from tests.annexes.page.run_folder import RunFolder
from tests.annexes.page.runs.test_runs import STEPS, own, tell
from tests.tools.commands import PACE
from tests.tools.processes import PATIENCE
from tests.tools.workspace import Workspace

pytestmark = pytest.mark.slow(6)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
expect = sync_api.expect


@pytest.fixture
def project(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workspace]:
    made = Workspace.create(tmp_path.resolve() / "project", t2i_checkpoint)
    monkeypatch.chdir(made.folder)
    with ending_runs(made.folder):
        yield made


@pytest.fixture
def page(browser: Any, project: Workspace) -> Iterator[Any]:
    with opened(browser, project.folder, "#run") as page:
        yield page


def state(page: Any) -> Any:
    return page.locator("[data-part=head] .state")


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def test_a_run_goes_from_its_start_to_its_last_preview(
    page: Any, project: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PACE, "0.2")  # the rest of the machine is for the browser
    shown = {
        "validation_disable": False,
        "validation_step_interval": 10,
        "checkpoint_step_interval": 1000,
    }
    project.write_config(**shown, max_train_steps=5000)
    expect(state(page)).to_have_text("not started")
    press(page, "Start")
    # The caption of a preview; a browser that is slow to start sees none of the first ones.
    expect(page.locator(".shots.main figcaption").first).to_contain_text(re.compile(r"step \d+"))
    expect(state(page)).to_have_text("running")
    expect(page.locator(".run-list .state").first).to_have_text("running")
    expect(page.locator("figure.chart").first).to_contain_text("Loss")
    expect(page.locator(".shots.main img").last).to_have_js_property("naturalWidth", 128)
    page.reload()
    expect(state(page)).to_have_text("running")
    press(page, "Save now")
    expect(page.locator(".console")).to_contain_text("Saved checkpoint-")
    expect(page.locator(".answers")).to_contain_text("Saved checkpoint-")

    pid = Run("", project.path("output")).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    expect(state(page)).to_have_text("interrupted")
    expect(page.locator(".sentence")).to_contain_text("Ended unexpectedly at step")
    monkeypatch.setenv(PACE, "0")
    last = (
        int(project.metrics()[-1]["step"]) + 2
    )  # it goes on from the checkpoint, some steps before
    page.get_by_label("To step").fill(str(last))
    press(page, "Continue")
    expect(state(page)).to_have_text("finished")
    expect(page.locator(".sentence")).to_contain_text("The file loads in diffusers.")
    expect(page.locator(".shots.main figcaption").first).to_contain_text(f"step {last}")
    expect(page.get_by_role("link", name="Report")).to_be_visible()


@pytest.fixture
def finished(project: Workspace) -> Path:
    """A run that has ended, with two previews of two prompts."""
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS, StateChanged("finished", 3, 9, "done"))
    preview(output, *((step, name) for step in (0, 3) for name in ("validation", "bird")))
    return output


def preview(output: Path, *shots: tuple[int, str]) -> list[MediaRendered]:
    """Record that pictures were rendered; any will do."""
    events = []
    media = MediaFile(output / MEDIA_FILE, 9)
    for step, name in shots:
        path = output / f"{name}-{step}.png"
        path.write_bytes((output.parent / "datasets" / "pictures" / "p1.png").read_bytes())
        events.append(MediaRendered(MediaRecord(step, name, f"a {name}", path.name, 64, 64)))
        media.append(events[-1].media)
    media.close()
    return events


def test_previews_grow_compare_and_enlarge(page: Any, project: Workspace, finished: Path) -> None:
    page.reload()
    expect(page.locator(".shots.main .beside")).to_have_count(2)
    first = page.locator(".shots.main button.preview").first
    first.click()
    viewer = page.locator("#viewer")
    expect(viewer).to_contain_text("a validation")
    page.keyboard.press("ArrowRight")
    expect(viewer).to_contain_text("step 3")
    page.get_by_role("button", name="Compare with step 0").click()
    expect(viewer.locator(".compare")).to_be_visible()
    page.keyboard.press("Escape")
    expect(viewer).to_be_hidden()
    page.get_by_label("beside").select_option("nothing")
    expect(page.locator(".shots.main .beside")).to_have_count(0)
    first.evaluate("node => { node.kept = true; node.focus(); }")
    own(finished)
    tell(finished, *STEPS, *preview(finished, (4, "validation"), (4, "bird")))
    expect(state(page)).to_have_text("running")
    expect(page.locator(".shots.main figcaption").first).to_contain_text("step 4")
    expect(first).to_have_js_property("kept", True)
    expect(first).to_be_focused()


def test_a_slider_shows_the_previews_of_any_step(page: Any, finished: Path) -> None:
    page.reload()
    tags = page.locator(".shots.main .step-tag")
    expect(tags).to_have_text(["step 0", "step 3"] * 2)

    page.get_by_label("beside").select_option("nothing")
    page.get_by_label("Step of the previews").press("Home")
    small = page.get_by_role("group", name="Size of the previews").get_by_role(
        "button", name="Small"
    )
    small.click()
    page.reload()

    expect(small).to_have_attribute("aria-pressed", "true")
    page.get_by_label("Step of the previews").press("Home")
    expect(page.locator(".shots.main button.preview").last).to_have_attribute("data-step", "0")


def test_cancel_asks_and_says_what_is_lost(page: Any, project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS)
    own(output)
    expect(state(page)).to_have_text("running")

    press(page, "Cancel")

    dialog = page.get_by_role("dialog", name="Cancel this run?")
    expect(dialog).to_contain_text("The 3 steps since the start may be lost.")
    expect(dialog.get_by_role("button", name="Stop and save instead")).to_be_visible()
    press(page, "Go on training")
    expect(dialog).to_be_hidden()
    expect(state(page)).to_have_text("running")


def test_unreachable_server_is_not_shown_as_a_running_run(browser: Any, project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS)
    own(output)
    with ExitStack() as second, tab(browser) as page:
        with serving(project.folder) as (port, _):
            page.goto(f"http://127.0.0.1:{port}/#run")
            expect(state(page)).to_have_text("running")
        page.evaluate(
            "document.querySelector('[data-press=stop]').click()"
        )  # before the page has noticed
        expect(page.locator(".run-problems")).to_have_text("The server does not answer.")
        expect(page.get_by_role("alert")).to_contain_text(
            "The server does not answer. This was the state at"
        )
        assert page.locator("[data-part=head]").get_attribute("inert") is not None
        tell(output, StateChanged("failed", 3, 9, "The disk is full."))  # while the page was away
        second.enter_context(serving(project.folder, port=port))
        expect(state(page)).to_have_text("failed")
        expect(page.locator(".absence")).to_be_hidden()
        expect(page.locator(".run-problems")).to_be_hidden()


@pytest.mark.parametrize(("how", "status"), [("finished", "completed"), ("failed", "error")])
def test_the_page_of_a_run_says_that_it_has_ended(
    browser: Any, project: Workspace, monkeypatch: pytest.MonkeyPatch, how: Any, status: str
) -> None:
    monkeypatch.setattr(
        serve, "SHUTDOWN_SECONDS", PATIENCE
    )  # a run does not wait longer for its browsers
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS)
    own(output)
    listener = listen("127.0.0.1", 0)
    with tab(browser) as page:
        with page_of_run(listener, Access(), output, EventStream()):
            with page.expect_response(re.compile("/training/events")):
                page.goto(f"http://127.0.0.1:{listener.getsockname()[1]}/")
            expect(state(page)).to_have_text("running")
            tell(output, StateChanged(how, 3, 9, "what became of it"))
        expect(page.get_by_role("alert")).to_contain_text(
            "The run has ended, and its page with it."
        )
        expect(state(page)).to_have_text(how)
        expect(page.locator(".run-list .state")).to_have_class(f"state {status}")
        expect(page.locator(".run-main")).to_contain_text("what became of it")
        assert page.locator("[data-part=head]").get_attribute("inert") is not None


def test_all_runs_are_one_click_away_and_addresses_last(
    page: Any, project: Workspace, finished: Path
) -> None:
    other = project.path("other")
    other.mkdir()
    tell(other, *STEPS, StateChanged("failed", 3, 9, "The disk is full."))
    page.reload()
    page.locator(".run-list a", has_text="other").click()
    expect(page.locator(".message")).to_have_text("The disk is full.")
    assert f"run={run_id(other)}" in page.url
    page.reload()
    expect(page.get_by_role("heading", level=1)).to_have_text("other")
    expect(page.locator(".run-list a[aria-current=true]")).to_contain_text("other")
    # A deleted run is named before the page shows another.
    shutil.rmtree(other)
    expect(page.locator(".run-problems")).to_have_text(
        "other is no longer there. This is another run."
    )
    expect(page.locator(".run-list a[aria-current=true]")).to_contain_text("output")


# The page forbids `eval`, and so a function that Playwright would call until it is true.
LOADED = """
    () => new Promise((done) => {
        const clip = document.querySelector("video");
        const isLoading = () => clip.networkState === clip.NETWORK_LOADING;
        const look = () => isLoading() ? setTimeout(look, 50) : done();
        look();
    })
"""


def test_a_report_plays_its_large_clips_and_calls_nothing(browser: Any, tmp_path: Path) -> None:
    folder = tmp_path.resolve() / "output"
    (folder / "validation_images").mkdir(parents=True)
    tell(folder, *STEPS)
    write_mp4(folder / "validation_images/bird.mp4", [Image.new("RGB", (64, 32), "red")] * 5, 8)
    script = (
        "fetch('/api/configs/').then(() => 'called', () => 'refused').then((told) => { "
        "document.title = told })"
    )
    clip = '<video src="validation_images/bird.mp4" preload="auto"></video>'
    (folder / REPORT_FILE).write_text(
        f"<!DOCTYPE html>{clip}<script>{script}; window.opened = open('/')</script>"
    )
    with opened(browser, folder.parent) as page:
        statuses: list[int] = []
        pages = page.context.pages
        page.on(
            "response",
            lambda response: statuses.append(response.status) if "mp4" in response.url else None,
        )
        page.goto(page.url.partition("#")[0] + f"report/{run_id(folder)}")
        expect(page).to_have_title("refused")
        page.evaluate(LOADED)
        assert statuses
        assert set(statuses) <= {200, 206}
        assert page.evaluate("window.opened") is None
        assert page.context.pages == pages


@pytest.fixture
def swept(project: Workspace) -> Path:
    return RunFolder(evaluated=True, saved="result", swept=True, state="done").write(project.folder)


def test_a_run_with_a_sweep_fits_the_screen_of_a_phone(
    browser: Any, project: Workspace, swept: Path
) -> None:
    with opened(browser, project.folder, f"?run={run_id(swept)}#run") as page:
        page.set_viewport_size({"width": 400, "height": 800})
        expect(page.get_by_role("heading", name="Checkpoints compared")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_failed_response_is_shown_in_place_of_its_part(
    browser: Any, project: Workspace, swept: Path
) -> None:
    with opened(browser, project.folder, f"?run={run_id(swept)}#run") as page:
        expect(page.get_by_text("Download", exact=False).first).to_be_visible()
        page.route("**/results?*", lambda route: route.fulfill(status=500))
        page.reload()
        failure = page.locator("[data-part=results] [role=alert]")
        expect(failure).to_have_text("This part cannot be shown: the server answers 500.")
