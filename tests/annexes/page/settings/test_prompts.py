"""The preview prompts of a config as a list on the page, and the file that holds them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.page.settings.files import Configuration
from tests.annexes.page.page import opened
from tests.annexes.page.run_folder import RunFolder

CONFIG = {"model_family": "kandinsky5-image", "model_type": "lora", "output_dir": "output/cats"}
ROAD = "config=cats"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a config "cats" that names no library."""
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path)
    return tmp_path.resolve()


@pytest.fixture
def page(folder: Path) -> TestClient:
    return TestClient(create_app(Project(folder)), base_url="http://localhost:8001")


def write_config(folder: Path, **settings: Any) -> None:
    (folder / "config/cats").mkdir(parents=True, exist_ok=True)
    (folder / "config/cats/config.json").write_text(json.dumps({**CONFIG, **settings}))


def write_library(folder: Path, content: Any) -> Path:
    """A library that the config names, with this content."""
    file = folder / "prompts.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    write_config(folder, user_prompt_library="prompts.json")
    return file


def row(name: str, prompt: str, was: str = "", **settings: str) -> dict[str, str]:
    return {"was": was, "name": name, "prompt": prompt, **settings}


def shown(page: TestClient) -> str:
    answer = page.get(f"/prompts?{ROAD}")
    assert answer.status_code == 200, answer.text
    return answer.text


def tag_of(page: TestClient) -> str:
    (tag,) = re.findall(r'data-etag="([^"]*)"', shown(page))
    return tag.replace("&#34;", '"')


def put(page: TestClient, *rows: dict[str, str], tag: str | None = None) -> Any:
    tag = tag_of(page) if tag is None else tag
    headers = {"If-Match": tag} if tag else {}
    return page.put(f"/api/prompts?{ROAD}", json={"prompts": rows}, headers=headers)


def messages(answer: Any) -> list[str]:
    assert answer.status_code == 422, answer.text
    return [problem["message"] for problem in answer.json()["problems"]]


def rendered(folder: Path) -> list[str]:
    """The names of the prompts that a run of the config renders; the plan has no error."""
    judgement, outside, _ = Configuration.saved(Project(folder), "cats").judge()
    assert [*outside, *(each for each in judgement.problems if each.fatal)] == []
    return [prompt.short_name for prompt in judgement.prompts]


def test_saving_creates_the_file_beside_the_config_which_then_names_it(
    page: TestClient, folder: Path
) -> None:
    assert "Saving creates this file, and the config then names it" in shown(page)

    note = put(page, row("cat", "a cat", seed="7", resolution="1024"), row("", "a dog")).json()

    library = json.loads((folder / "config/cats/user_prompt_library.json").read_text())
    assert library == {
        "cat": {"prompt": "a cat", "seed": 7, "resolution": "1024"},
        "a_dog": "a dog",
    }
    config = json.loads((folder / "config/cats/config.json").read_text())
    assert config == {**CONFIG, "user_prompt_library": "config/cats/user_prompt_library.json"}
    assert rendered(folder) == ["cat", "a_dog"]
    assert note["note"] == (
        "Saved 2 prompts to config/cats/user_prompt_library.json. The config names this file now. "
        "The next start uses them."
    )


def test_keys_and_spellings_that_the_page_does_not_show_are_kept(
    page: TestClient, folder: Path
) -> None:
    file = write_library(
        folder,
        {
            "cat": {"_note": "mine", "seed": "7", "prompt": "a cat", "guidance": 4.0},
            "dog": {"prompt": "a dog"},
            "sky": "a sky",
        },
    )

    put(
        page,
        row("sky", "a red sky", was="sky"),
        row("tom", "a cat", was="cat", seed="7", guidance="4.0"),
        row("dog", "a dog", was="dog"),
    )

    assert json.loads(file.read_text()) == {
        "sky": "a red sky",
        "tom": {"_note": "mine", "seed": "7", "prompt": "a cat", "guidance": 4.0},
        "dog": {"prompt": "a dog"},
    }
    assert [*json.loads(file.read_text())] == ["sky", "tom", "dog"]
    assert rendered(folder) == ["sky", "tom", "dog"]


def test_an_emptied_setting_is_removed(page: TestClient, folder: Path) -> None:
    file = write_library(folder, {"cat": {"prompt": "a cat", "seed": 7, "guidance": 4}})

    put(page, row("cat", "a cat", was="cat", seed="", guidance="4"))

    assert json.loads(file.read_text()) == {"cat": {"prompt": "a cat", "guidance": 4}}


def test_a_copied_row_keeps_what_the_page_does_not_show(page: TestClient, folder: Path) -> None:
    file = write_library(folder, {"cat": {"_note": "mine", "prompt": "a cat"}})

    put(page, row("cat", "a cat", was="cat"), row("cat_2", "a big cat", was="cat"))

    copied = json.loads(file.read_text())["cat_2"]
    assert copied == {"_note": "mine", "prompt": "a big cat"}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"prompt": " "}, "the prompt 'cat' is empty or not text."),
        ({"seed": "-1"}, "Seed of 'cat': '-1' is below 0."),
        ({"seed": "x"}, "Seed of 'cat': 'x' is not a whole number."),
        ({"guidance": "0"}, "Guidance of 'cat': '0' is not between 1 and 100."),
        ({"resolution": "wide"}, "Size of 'cat': 'wide' is not a size such as 1024 or 1280x768."),
        ({"picture": "no.png"}, "Picture of 'cat': "),
        ({"picture": "../x.png"}, "Picture of 'cat': '../x.png' is outside the project"),
        ({"picture": "\0"}, "Picture of 'cat': "),
    ],
)
def test_what_the_plan_would_refuse_is_named_and_not_saved(
    page: TestClient, folder: Path, settings: dict[str, str], complaint: str
) -> None:
    file = write_library(folder, {"cat": "a cat"})

    (message,) = messages(put(page, {**row("cat", "a cat", was="cat"), **settings}))

    assert message.startswith(complaint)
    assert file.read_text() == '{"cat": "a cat"}'


def test_two_prompts_of_one_name_are_refused(page: TestClient, folder: Path) -> None:
    write_library(folder, {})

    (message,) = messages(put(page, row("cat", "one"), row("cat ", "two")))

    assert message == "Two prompts are called 'cat': give one another name."


def test_prompts_without_a_name_are_named_by_their_words(page: TestClient, folder: Path) -> None:
    file = write_library(folder, {})

    put(page, row("a_cat", "one"), row("", "a cat"), row("", "a cat"), row("", "🐈"))

    assert [*json.loads(file.read_text())] == ["a_cat", "a_cat_2", "a_cat_3", "prompt"]


def test_an_empty_list_and_empty_rows_leave_the_empty_prompt(
    page: TestClient, folder: Path
) -> None:
    file = write_library(folder, {"cat": "a cat"})

    assert put(page, row("", "")).status_code == 200

    assert json.loads(file.read_text()) == {}
    assert rendered(folder) == ["unconditional"]
    assert "Also rendered: the empty prompt." in shown(page)


def test_two_hundred_prompts_of_ten_thousand_characters_are_saved(
    page: TestClient, folder: Path
) -> None:
    write_library(folder, {})

    answer = put(page, *(row(f"p{number}", "word " * 2000) for number in range(200)))

    assert answer.status_code == 200, answer.text
    assert len(rendered(folder)) == 200
    assert shown(page).count('class="prompt-item"') == 201, "with the one that is copied"


def test_a_request_that_is_too_large_is_answered(page: TestClient, folder: Path) -> None:
    write_library(folder, {})

    assert put(page, row("cat", "x" * 3_000_000)).status_code == 413


def test_a_file_that_changed_meanwhile_is_kept(page: TestClient, folder: Path) -> None:
    file = write_library(folder, {"cat": "a cat"})
    tag = tag_of(page)
    file.write_text('{"dog": "a dog"}')

    refused = put(page, row("cat", "mine", was="cat"), tag=tag)
    forced = put(page, row("cat", "mine", was="cat"), tag=refused.headers["ETag"])

    assert refused.status_code == 412
    assert "has changed since it was opened" in refused.json()["problems"][0]["message"]
    assert forced.status_code == 200
    assert json.loads(file.read_text()) == {"cat": "mine"}


def test_a_file_that_appeared_meanwhile_is_kept(page: TestClient, folder: Path) -> None:
    tag = tag_of(page)
    (folder / "config/cats/user_prompt_library.json").write_text('{"dog": "a dog"}')

    answer = put(page, row("cat", "mine"), tag=tag)

    assert answer.status_code == 412
    assert "user_prompt_library" not in (folder / "config/cats/config.json").read_text()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"a": ', "is not valid JSON"),
        ("[1]", "must hold one object of names and prompts, not a list."),
        ('{"a": "x", "a": "y"}', "contains &#39;a&#39; twice"),
    ],
)
def test_a_damaged_file_is_named_and_kept(
    page: TestClient, folder: Path, content: str, reason: str
) -> None:
    file = write_library(folder, content)

    assert reason in shown(page)
    assert "<form" not in shown(page)
    answer = put(page, row("cat", "a cat"), tag='"0"')
    assert answer.status_code in (412, 422)
    assert file.read_text() == content


def test_a_library_outside_the_project_is_refused(page: TestClient, folder: Path) -> None:
    write_config(folder, user_prompt_library="../prompts.json")

    answer = page.get(f"/prompts?{ROAD}")

    assert answer.status_code == 403
    assert "is outside the project" in answer.text


def test_a_config_that_does_not_exist_has_no_list(page: TestClient) -> None:
    answer = page.get("/prompts?config=dogs")

    assert answer.status_code == 404
    assert "save it first" in answer.text


def test_the_prompts_of_an_example_are_shown_and_cannot_be_changed(page: TestClient) -> None:
    road = "config=examples/demo"

    text = page.get(f"/prompts?{road}").text
    answer = page.put(f"/api/prompts?{road}", json={"prompts": []})

    assert "fieldset disabled" in text
    assert 'value="save"' not in text
    assert answer.status_code == 403


def test_pictures_outside_the_project_are_not_opened_by_the_check(
    page: TestClient, folder: Path
) -> None:
    write_library(folder, {"cat": {"prompt": "a cat", "picture": "/etc/passwd"}})

    body = {"config": "cats", "values": {**CONFIG, "user_prompt_library": "prompts.json"}}
    problems = page.post("/api/training/validate", json=body).json()["problems"]

    (message,) = [each["message"] for each in problems if each["key"] == "user_prompt_library"]
    assert message.startswith("prompts.json: 'picture' of 'cat': '/etc/passwd' is outside the")


def test_pictures_are_offered_and_shown_for_models_that_start_from_one(
    page: TestClient, folder: Path
) -> None:
    Image.new("RGB", (64, 64)).save(folder / "cat.png")
    write_library(folder, {"cat": {"prompt": "a cat", "picture": "cat.png"}, "b": "x"})
    assert "so pictures have no effect" in shown(page)

    write_config(folder, user_prompt_library="prompts.json", model_flavour="i2i-lite-sft")

    (thumbnail,) = re.findall(r'<img src="(/library/thumbnail[^"]+)"', shown(page))
    assert "so pictures have no effect" not in shown(page)
    assert page.get(thumbnail.replace("&amp;", "&")).status_code == 200


def test_empty_settings_show_those_of_the_run(page: TestClient, folder: Path) -> None:
    write_config(folder, validation_seed=5, validation_guidance=3.5, validation_resolution="768")

    text = shown(page)

    for value in ("5", "3.5", "768x768"):
        assert f'placeholder="{value}"' in text


def test_a_size_that_the_model_must_round_is_said(page: TestClient, folder: Path) -> None:
    write_library(folder, {"cat": {"prompt": "a cat", "resolution": "700x500"}})

    assert "Size of &#39;cat&#39;: 700x500 is not a multiple of 16 px" in shown(page)


def test_a_run_at_work_keeps_its_prompts_and_says_so(page: TestClient, folder: Path) -> None:
    run = RunFolder(False, "nothing", False, "running").write(folder)
    write_config(folder, output_dir=str(run))
    previews = page.get(f"/runs/{run_id(run.resolve())}/previews").text
    (config,) = re.findall(r'data-prompts="([^"]+)"', previews)

    text = page.get(f"/prompts?config={config}").text

    assert "keeps the prompts that it read when it started" in text


@pytest.mark.slow(4)
def test_prompts_are_changed_in_the_browser_and_the_plan_has_them(
    browser: Any, folder: Path
) -> None:
    write_library(folder, {"cat": "a cat", "dog": "a dog"})
    with opened(browser, folder, "?config=cats#validation") as page:
        page.get_by_role("button", name="Edit the prompts").click()
        dialog = page.get_by_role("dialog", name="Preview prompts of cats")
        rows = dialog.locator("li.prompt-item")

        rows.nth(0).get_by_role("button", name="Duplicate").click()
        rows.nth(1).get_by_label("Prompt").fill("a sleeping cat")
        rows.nth(1).get_by_label("Seed").fill("7")
        rows.nth(2).get_by_role("button", name="Move up").click()
        rows.nth(0).get_by_role("button", name="Remove").click()
        page.keyboard.press("Escape")
        dialog.get_by_text("There are unsaved changes.").wait_for()
        dialog.get_by_role("button", name="Save", exact=True).click()
        dialog.get_by_text("Saved 2 prompts to prompts.json.").wait_for()
        dialog.get_by_role("button", name="Close").click()
        dialog.wait_for(state="hidden")

    saved = json.loads((folder / "prompts.json").read_text())
    assert [*saved.items()] == [
        ("dog", "a dog"),
        ("cat_2", {"prompt": "a sleeping cat", "seed": 7}),
    ]
    assert rendered(folder) == ["dog", "cat_2"]
