"""Roads through the page from end to end, and what walking them has found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs import control
from simpletuner.annexes.page.runs.queue import JOBS, QUEUE_FILE, Job
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.report.samples import samples_in
from tests.annexes.page.new.test_start_page import PLAN, started
from tests.annexes.page.page import open_part, opened
from tests.annexes.page.runs.test_run_page import preview
from tests.annexes.page.runs.test_runs import STEPS, tell
from tests.tools.web_server import picture
from tests.tools.workspace import Workspace

__all__ = ["started"]
sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
expect = sync_api.expect


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    made = Workspace.create(tmp_path.resolve() / "project", tmp_path, pictures=2)
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The plan that the page gets, for tests to change."""
    document = {**PLAN}

    async def answer(*given: object) -> tuple[str, str]:
        return json.dumps(document), ""

    monkeypatch.setattr(control, "run_while_wanted", answer)
    return document


def skipped(page: Any) -> list[str]:
    return [str(content) for content in page.locator("#start-skipped li").all_text_contents()]


@pytest.mark.slow(6)
def test_from_an_empty_project_to_the_queue(
    browser: Any, folder: Path, started: list[list[str]]
) -> None:
    refused: list[str] = []
    for name, content in {
        "0.png": picture(0),
        "1.png": picture(1),
        "notes.txt": b"hm",
        "torn.png": b"?",
    }.items():
        (folder / name).write_bytes(content)
    with opened(browser, folder) as page:
        page.on(
            "response", lambda answer: refused.append(answer.url) if answer.status >= 400 else None
        )
        page.reload()
        chooser = page.locator("#drop-files")
        chooser.set_input_files(
            [folder / name for name in ("0.png", "1.png", "notes.txt", "torn.png")]
        )
        expect(page.locator("#start-told")).to_contain_text("2 pictures")
        # What the folder as a whole tells, too: that no picture has the name of a text.
        assert sorted(skipped(page)) == [
            "notes.txt: has no picture or clip of the same name",
            "torn.png: is not a picture",
        ]
        chooser.set_input_files([folder / "torn.png"])
        expect(page.locator("#start-skipped li")).to_have_count(2)
        expect(page.locator("#start-told")).to_contain_text("2 pictures")
        assert refused == []
        page.get_by_label("Name it").fill("zkt, a stone")
        name = page.get_by_label("Name of the run")
        name.fill("config")
        card = page.locator("#start-form")
        card.get_by_role("button", name="Add to queue").click()
        expect(card.get_by_role("alert")).to_have_text(
            "'config' is the name of config/config.json; choose another."
        )
        name.fill("cats")
        card.get_by_role("button", name="Add to queue").click()
        expect(page.locator(".queue li")).to_contain_text(["cats"])
    assert (folder / "config/cats/config.json").is_file()


@pytest.mark.slow(6)
def test_new_config_is_not_requested_before_it_exists(
    browser: Any, project: Workspace, planned: dict[str, Any]
) -> None:
    refused: list[str] = []
    project.write_config(validation_negative_prompt="")
    with opened(browser, project.folder, "#basic") as page:
        page.on(
            "response", lambda answer: refused.append(answer.url) if answer.status >= 400 else None
        )
        open_part(page, "Previews")
        expect(page.locator("#f-validation_negative_prompt")).to_have_attribute(
            "placeholder", "empty"
        )
        page.get_by_role("button", name="New config").click()
        dialog = page.get_by_role("dialog", name="New config")
        for name, words in {
            "config": "There is a config config already.",
            "a b": "Give it a name",
        }.items():
            dialog.get_by_label("Name, for").fill(name)
            dialog.get_by_role("button", name="Create").click()
            expect(dialog.get_by_role("alert")).to_contain_text(words)
        dialog.get_by_label("Name, for").fill("mine")
        dialog.get_by_role("button", name="Create").click()
        open_part(page, "Run")
        expect(page.get_by_label("Output Folder", exact=True)).to_have_value("output/mine")
        open_part(page, "Data")
        page.get_by_text("Dataset file").click()
        expect(page.locator("#f-data_backend_config")).to_have_value(
            "config/mine/multidatabackend.json"
        )
        assert refused == []
        page.goto(page.url.partition("?")[0] + "?config=gone")
        expect(page.locator("#saved")).to_have_text("There is no config gone.")
        expect(page.locator("#config")).to_have_value("config")


@pytest.mark.slow(6)
def test_plan_reports_a_problem_once_with_its_remedy(
    browser: Any, project: Workspace, planned: dict[str, Any]
) -> None:
    project.write_config(train_batch_size=0)
    batch = "with train_batch_size 8 a step would take as long: the GPU waits for the host"
    missing = "these folders do not exist or cannot be listed: pictures: 'datasets/pictures'."
    with opened(browser, project.folder, "#basic") as page:
        told = page.locator("[data-key=train_batch_size] .told .bad")
        expect(told).to_have_count(1)
        said = page.request.post(
            page.url.split("?")[0].rstrip("/") + "/api/training/validate",
            data={"config": "config", "values": {"train_batch_size": 0}},
        ).json()
        first = next(each for each in said["problems"] if each["key"] == "train_batch_size")
        fits = {
            **first,
            "message": f"{first['message']} This would fit.",
            "remedy": {"train_batch_size": 2},
        }
        folder = {
            "key": "instance_data_dir",
            "message": missing,
            "fatal": True,
            "entries": ["pictures"],
        }
        planned |= {"problems": [fits, folder]}
        planned |= {"offload_auto": [batch], "proposals": {batch: {"train_batch_size": 8}}}
        page.reload()
        expect(told).to_contain_text("This would fit. Apply")
        expect(told).to_have_count(1)
        expect(page.locator(".dataset-card [data-key=instance_data_dir] .bad")).to_have_text(
            missing
        )
        expect(page.locator("#problems li")).to_have_count(0)
        page.locator("#plan").get_by_role("button", name="Apply").click()
        expect(page.locator("#f-train_batch_size")).to_have_value("8")


@pytest.mark.slow(6)
def test_a_comparison_grows_with_a_round_of_previews(browser: Any, project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS, *preview(output, (0, "validation"), (0, "bird"), (3, "validation")))
    with opened(browser, project.folder, "#run") as page:
        page.get_by_label("beside").select_option("step 0")
        compared = page.locator(".shots.main .step-tag")
        expect(compared).to_have_text(["step 0", "step 3"])
        tell(output, *STEPS, *preview(output, (3, "bird")))
        expect(compared).to_have_text(["step 0", "step 3"] * 2)


@pytest.mark.slow(6)
def test_interrupted_job_is_requeued_from_the_page(
    browser: Any, project: Workspace, started: list[list[str]]
) -> None:
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS)
    jobs = [
        Job(
            "1",
            "train",
            str(output),
            "config",
            state="interrupted",
            message="Ended unexpectedly at step 3.",
        ),
        Job("2", "train", str(project.path("gone")), "gone"),
    ]
    project.path(QUEUE_FILE).write_bytes(JOBS.dump_json(jobs))
    with opened(browser, project.folder, "#run") as page:
        page.get_by_role("button", name="Continue output").click()
        expect(page.locator(".queue li").first).not_to_contain_text("Ended unexpectedly")


def test_invalid_names_of_new_configs_are_refused(folder: Path) -> None:
    project = Project(folder)
    (folder / "config" / "old").mkdir(parents=True)
    for name, words in {
        "config": "choose another",
        "../x": "letters, digits",
        "old": "already",
    }.items():
        with pytest.raises(Exception, match=words):
            project.new_config(name)
    assert project.new_config("new") == folder / "config/new/config.json"


def test_the_strengths_of_a_prompt_stay_together(folder: Path) -> None:
    for number, (prompt, strength) in enumerate([("a", 0.5), ("b", 0.5), ("a", 1), ("b", 1)]):
        made = {
            "prompt": prompt,
            "seed": 7,
            "index": 0,
            "width": 64,
            "height": 64,
            "step": 3,
            "strength": strength,
        }
        (folder / f"{number}.png").write_bytes(b"")
        (folder / f"{number}.json").write_text(json.dumps(made))
        os.utime(folder / f"{number}.png", (number, number))
    newest_first = ["b, seed 7", "b, seed 7, at 0.5", "a, seed 7", "a, seed 7, at 0.5"]
    assert [record.short_name for record in samples_in(folder)] == newest_first


def test_unwritable_folder_is_reported(project: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *arguments: object, **more: object) -> None:
        raise OSError(30, "Read-only file system", str(project.path("config")))

    page = TestClient(create_app(Project(project.folder)), raise_server_exceptions=False)
    monkeypatch.setattr(Path, "mkdir", refuse)
    answer = page.put("/api/configs/new", json={"values": {"seed": 1}})
    assert answer.status_code == 422, answer.text
    assert "cannot be written (Read-only file system)" in answer.json()["problems"][0]["message"]
