"""Answers that arrive late, in Chromium: nothing is shown of a run or a config that was left."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from simpletuner.annexes.page.runs.control import run_id
from simpletuner.data.clip_writer import write_mp4
from tests.annexes.page.page import go, opened
from tests.annexes.page.run_folder import RunFolder

pytestmark = pytest.mark.slow(6)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
expect = sync_api.expect

NAMES = ("first", "second")
Release = Callable[[], None]
PROMPTS = "name => { import('/static/prompts.js').then((script) => script.show(name)); }"
# What the places New and Settings tell the place Runs.
STARTED = "run => document.dispatchEvent(new CustomEvent('started', { detail: run }))"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with two configs, whose runs are finished."""
    folder = tmp_path.resolve()
    for name in NAMES:
        made = RunFolder(True, "result", True, "done", rounds=3).write(folder)
        output = folder / "output" / name
        output.parent.mkdir(exist_ok=True)
        made.rename(output)
        for record in (*output.glob("*.jsonl"), *output.glob("*/*.json")):
            record.write_text(record.read_text().replace("a bird", f"a {name} bird"))
        write_config(folder, name)
    return folder


def write_config(folder: Path, name: str) -> None:
    values = {
        "model_family": "kandinsky5-image",
        "model_flavour": "t2i-lite-sft",
        "model_type": "lora",
        "output_dir": f"output/{name}",
        "max_train_steps": 100,
        "validation_prompt": f"a {name} bird",
    }
    file = folder / "config" / name / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(values))


@pytest.fixture
def page(browser: Any, project: Path) -> Iterator[Any]:
    """The page of the project, at its first run."""
    with opened(browser, project, "#run") as page:
        choose(page, "first")
        yield page


def choose(page: Any, name: str) -> None:
    """Choose a run, and wait until all of it is shown."""
    pick(page, name)
    expect(page.locator("[data-part=head] h1")).to_have_text(name)
    expect(page.locator("[data-part=results] .table-box")).to_be_visible()
    expect(page.locator("[data-part=previews] .shots.main")).to_be_visible()


def pick(page: Any, name: str) -> None:
    page.locator(f"[data-part=list] a[data-config={name}]").click()


@contextmanager
def held(page: Any, pattern: str) -> Iterator[tuple[list[Any], Release]]:
    """Hold back answers: those that have come so far, and what lets them go."""
    answers: list[Any] = []

    def hold(route: Any) -> None:
        answers.append((route, route.fetch()))

    def release() -> None:
        for route, answer in answers:
            route.fulfill(response=answer)
        answers.clear()
        page.unroute(pattern)
        page.wait_for_timeout(300)  # for the scripts that wait for them

    page.route(pattern, hold)
    yield answers, release


def wait_for(page: Any, answers: list[Any]) -> None:
    """Wait until an answer is held back."""
    for _ in range(100):
        if answers:
            return
        page.wait_for_timeout(50)
    raise AssertionError("nothing was asked")


def test_the_file_of_a_run_that_was_left_is_not_offered(page: Any) -> None:
    with held(page, "**/use?**") as (answers, release):
        page.locator("[data-use]").first.click()
        wait_for(page, answers)

        choose(page, "second")
        release()

    expect(page.locator("#use")).to_be_hidden()


def test_previews_of_a_run_that_was_left_are_not_shown(page: Any) -> None:
    with held(page, "**/previews?**only=shots**") as (answers, release):
        page.locator(".slider input").focus()
        page.keyboard.press("ArrowLeft")
        wait_for(page, answers)

        choose(page, "second")
        release()

    # At once: the next answer would hide it.
    shown = page.locator("[data-part=previews] .shots.main img").first
    assert shown.get_attribute("src").startswith("/media/second-")


def test_a_slow_answer_about_a_run_that_was_left_delays_no_other(page: Any) -> None:
    choose(page, "second")
    with held(page, "**/runs/first-*/results?**") as (answers, release):
        pick(page, "first")
        wait_for(page, answers)
        page.wait_for_timeout(1500)  # the page asks less often for what is slow

        pick(page, "second")
        release()

    expect(page.locator("[data-part=results] .table-box")).to_be_visible(timeout=5000)


def test_a_run_that_was_just_started_is_kept_although_an_older_list_lacks_it(
    page: Any, project: Path
) -> None:
    with held(page, "**/runs") as (answers, release):
        page.evaluate("import('/static/run.js').then((script) => script.want('list'))")
        wait_for(page, answers)
        output = RunFolder(False, "nothing", False, "running").write(project / "output")

        page.evaluate(STARTED, run_id(output))
        release()

    expect(page.locator("[data-part=head] .state")).to_have_text("running")
    expect(page.locator(".run-problems")).to_be_hidden()


def test_the_config_that_was_asked_for_last_is_open(page: Any) -> None:
    go(page, "Settings")
    config = page.locator("#config")
    expect(config).to_have_value("first")
    config.select_option("second")
    expect(page.locator("#saved")).to_have_text("")
    with held(page, "**/api/configs/first") as (answers, release):
        config.select_option("first")
        wait_for(page, answers)

        config.select_option("second")
        page.wait_for_timeout(500)
        release()

    expect(config).to_have_value("second")
    assert "config=second" in page.url
    assert "run=second-" in page.url


def test_the_prompts_that_were_asked_for_last_are_listed(page: Any) -> None:
    with held(page, "**/prompts?config=first") as (answers, release):
        page.evaluate(PROMPTS, "first")
        wait_for(page, answers)

        page.evaluate(PROMPTS, "second")
        expect(page.locator("#prompts-title")).to_contain_text("second")
        release()

    expect(page.locator("#prompts-title")).to_contain_text("second")


def test_the_facts_of_a_drop_are_of_the_model_that_is_chosen(page: Any, tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    write_mp4(clip, [Image.new("RGB", (832, 480), (shade, 0, 0)) for shade in range(0, 200, 2)], 24)
    go(page, "New")
    page.locator("#drop input[type=file]").first.set_input_files(str(clip))
    models = page.locator("#start-models input")
    expect(models.nth(1)).to_be_attached()
    expect(page.locator("#start-models")).not_to_contain_text("computing")
    size = page.locator("#start-size")
    models.nth(1).check()
    page.wait_for_timeout(1000)
    of_second = size.inner_text()
    models.nth(0).check()
    expect(size).not_to_have_text(of_second)
    with held(page, "**/api/start/look") as (answers, release):
        models.nth(1).check()
        wait_for(page, answers)
        models.nth(0).check()
        page.wait_for_timeout(500)
        answers.reverse()

        release()

    expect(size).not_to_have_text(of_second)
