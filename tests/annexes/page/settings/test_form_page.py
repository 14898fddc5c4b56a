"""The form in Chromium: labels, greying, defaults, problems beside their fields, saving, and what a
conflict loses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.annexes.page.page import go, open_part, opened, parts_of_settings, serving, tab
from tests.annexes.page.settings.test_form import csv_entry
from tests.tools.web_server import picture, serve
from tests.tools.workspace import DATASETS, Workspace

pytestmark = pytest.mark.slow(4)
sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
expect = sync_api.expect


SECRET = "https://hooks.slack.com/services/old"
UNKNOWN = {"my_own_key": {"kept": [1, 2]}}


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the config, which tests replace."""
    return UNKNOWN


@pytest.fixture
def workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> Workspace:
    made = Workspace.create(tmp_path / "project", tmp_path, pictures=2)
    made.write_config(pretrained_model_name_or_path=None, **settings)
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def page(browser: Any, workspace: Workspace, settings: dict[str, Any]) -> Iterator[Any]:
    """The page, with the first check done."""
    with opened(browser, workspace.folder.resolve(), "#basic") as page:
        expect(page.locator("#f-train_batch_size")).to_have_value("2")
        if settings["my_own_key"]:
            expect(page.locator("#problems")).to_contain_text("my_own_key is not a known key.")
        yield page


def saved(workspace: Workspace) -> dict[str, Any]:
    return dict(json.loads(workspace.path("config/config.json").read_text()))


def save(page: Any) -> None:
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("#saved")).to_have_text("Saved")


def test_crepa_is_in_the_section_that_guides_name(page: Any, workspace: Workspace) -> None:
    open_part(page, "Training")
    section = page.get_by_role("group", name="Loss functions")
    assert section.get_attribute("id") == "training/loss_functions"
    for label in ("Block Index", "Weight", "Adjacent Distance", "Temporal Decay", "Vision Encoder"):
        expect(
            section.locator("[data-group=CREPA]").get_by_label(label, exact=True)
        ).to_be_disabled()
    drop = section.get_by_label("Drop VAE Encoder", exact=True)
    expect(drop).to_be_disabled()
    expect(section).to_contain_text("options have no effect without crepa_enabled.")
    section.get_by_label("CREPA", exact=True).check()
    expect(drop).to_be_enabled()
    expect(page.locator("[data-key=crepa_enabled] .bad")).to_contain_text(
        "aligns the frames of clips"
    )
    drop.check()
    save(page)
    assert saved(workspace)["crepa_drop_vae_encoder"] is True
    # Defaults follow the family.
    block = page.locator("#f-crepa_block_index")
    flavour = page.locator("#f-model_flavour")
    expect(block).to_have_attribute("placeholder", "8")
    open_part(page, "Run")
    page.get_by_label("Family", exact=True).select_option("sanavideo")
    expect(block).to_have_attribute("placeholder", "10")
    expect(flavour.locator("option", has_text="2b-480p")).to_have_count(1)
    expect(page.locator("[data-key=model_flavour] .bad")).to_contain_text(
        "'t2i-lite-sft' belongs to kandinsky5-image"
    )


@pytest.mark.parametrize("settings", [{**UNKNOWN, "validation_disable": False}])
def test_conflict_is_shown_beside_its_field(page: Any) -> None:
    open_part(page, "Memory and speed")
    page.get_by_label("Enable Group Offload", exact=True).check()
    page.get_by_label("Enable Model CPU Offload", exact=True).check()
    told = page.locator("[data-key=enable_group_offload] .bad")
    expect(told).to_have_text(
        "Enable Group Offload cannot be combined with Enable Model CPU Offload: one streams the "
        "blocks, the other moves them all."
    )
    expect(parts_of_settings(page)).to_contain_text("Memory and speed1")
    page.get_by_role("button", name="Use the default of Enable Model CPU Offload").click()
    expect(told).to_have_count(0)


def test_changes_on_disk_are_shown_when_the_window_gets_focus(
    page: Any, workspace: Workspace
) -> None:
    card = page.locator(".dataset-card").first
    steps = page.locator("#f-max_train_steps")
    come_back = "dispatchEvent(new Event('focus'))"
    workspace.write_config(my_own_key=None, max_train_steps=9)
    page.evaluate(come_back)
    expect(steps).to_have_value("9")
    expect(page.locator("#problems")).to_be_empty()
    open_part(page, "What")
    expect(card.locator(".used")).to_have_text("2 of 2 files used")
    workspace.add_pictures("datasets/pictures", 3)
    page.evaluate(come_back)
    expect(card.locator(".used")).to_have_text("3 of 3 files used")
    # What is not saved stays, and the page says that there is something else in the file.
    open_part(page, "Run")
    steps.fill("5")
    workspace.write_config(seed=3)
    page.evaluate(come_back)
    expect(page.locator("#saved")).to_have_text(
        "The file has also changed on disk; Save compares both versions."
    )
    expect(steps).to_have_value("5")


def test_focused_field_is_not_replaced(page: Any, workspace: Workspace) -> None:
    """Whoever types on from an old value would save it over the new one."""
    open_part(page, "Run")
    seed = page.locator("#f-seed")
    come_back = "dispatchEvent(new Event('focus'))"
    seed.focus()
    workspace.write_config(seed=3)
    page.evaluate(come_back)
    expect(page.locator("#saved")).to_have_text("The file has changed on disk and was reloaded.")
    expect(seed).to_have_value("3")
    page.get_by_text("The files as JSON").click()
    area = page.get_by_label("Config", exact=True).last
    area.focus()
    workspace.write_config(seed=4)
    page.evaluate(come_back)
    expect(area).to_have_value(re.compile('"seed": 4'))
    # What is no JSON yet waits for its writer.
    area.press("Control+End")
    area.press_sequentially(" ,")
    seed.focus()
    workspace.write_config(seed=5)
    page.evaluate(come_back)
    expect(page.locator("#saved")).to_have_text(
        "The file has also changed on disk; Save compares both versions."
    )
    expect(area).to_have_value(re.compile(r"} ,$"))
    assert saved(workspace)["seed"] == 5


def test_problem_of_a_file_disappears_once_it_is_repaired(page: Any, workspace: Workspace) -> None:
    path = workspace.path("config/config.json")
    told = page.locator("#raw .told")
    come_back = "dispatchEvent(new Event('focus'))"
    text = path.read_text()
    for content, said in (('{"seed": ', re.compile("is not valid JSON")), (text, "")):
        path.write_text(content)
        page.evaluate(come_back)
        expect(told.first).to_have_text(said)
    page.get_by_label("Batch Size", exact=True).fill("4")
    for content, said in (
        (text.replace("7", "8"), re.compile("Save compares both")),
        (text, "1 unsaved"),
    ):
        path.write_text(content)
        page.evaluate(come_back)
        expect(page.locator("#saved")).to_have_text(said)


def test_deleted_file_is_reported_at_once(page: Any, workspace: Workspace) -> None:
    told = page.locator("#saved")
    config = workspace.path("config/config.json")
    for path in (config, config.with_name("multidatabackend.json")):
        content = path.read_text()
        path.unlink()
        expect(told).to_have_text(f"config/{path.name} was deleted or moved; Save restores it.")
        page.get_by_role("button", name="Save", exact=True).click()
        page.get_by_role("dialog", name="The file was deleted or moved").get_by_role(
            "button", name="Restore everything"
        ).click()
        expect(told).to_have_text("Saved")
        assert json.loads(path.read_text()) == json.loads(content)
    config.rename(config.with_name("away.json"))
    expect(told).to_contain_text("was deleted or moved")
    config.with_name("away.json").rename(config)
    expect(told).to_be_empty()
    expect(page.locator("#save")).to_be_disabled()


def test_concurrent_changes_of_datasets_are_both_kept(page: Any, workspace: Workspace) -> None:
    path = workspace.path("config/multidatabackend.json")
    entries = json.loads(path.read_text())
    open_part(page, "What")
    page.locator(".dataset-card").first.get_by_label("Repeats", exact=True).fill("5")
    path.write_text(
        json.dumps([entries[0] | {"repeats": 4, "crop": False}, *entries[1:], {"id": "theirs"}])
    )
    page.get_by_role("button", name="Save", exact=True).click()
    dialog = page.get_by_role("dialog", name="The file has changed")
    name = entries[0]["id"]
    expect(dialog.get_by_role("row", name=f"{name}: repeats")).to_have_text(f"{name}: repeats45")
    expect(dialog.get_by_role("row", name=f"{name}: crop")).to_contain_text("not changed by you")
    dialog.get_by_role("button", name="Save mine over it").click()
    expect(page.locator("#save")).to_be_disabled()
    merged = [entries[0] | {"repeats": 5, "crop": False}, *entries[1:], {"id": "theirs"}]
    assert json.loads(path.read_text()) == merged


@pytest.mark.parametrize("settings", [{"my_own_key": None}])
def test_a_required_choice_is_no_default_and_captions_are_told_where_they_are_set(
    page: Any, workspace: Workspace
) -> None:
    workspace.path("datasets/pictures/p1.txt").unlink()
    page.evaluate("dispatchEvent(new Event('focus'))")
    open_part(page, "What")
    card = page.locator(".dataset-card").first
    expect(card.locator("[data-key=caption_strategy] .told")).to_contain_text("no caption")
    expect(card.locator("[data-key=id] .told p")).to_have_count(0)
    workspace.write_config(model_family=None)
    page.reload()
    expect(parts_of_settings(page)).to_contain_text("What1")
    family = page.locator("[data-key=model_family]")
    expect(family.locator(".bad")).to_have_text("Family is required.")
    expect(family.locator("option").first).to_have_text("choose one")


@pytest.mark.parametrize("settings", [{**UNKNOWN, "webhook_config": SECRET}])
def test_saving_writes_what_was_changed_and_keeps_the_rest(page: Any, workspace: Workspace) -> None:
    before = saved(workspace)
    page.get_by_label("Batch Size", exact=True).fill("4")
    open_part(page, "Run")
    page.locator("#f-seed").fill("")  # a cleared field removes its key
    expect(page.locator("#saved")).to_have_text("2 unsaved")
    assert page.evaluate("!dispatchEvent(new Event('beforeunload', {cancelable: true}))")
    save(page)
    after = saved(workspace)
    assert after == {
        **{key: value for key, value in before.items() if key != "seed"},
        "train_batch_size": 4,
    }
    assert list(after) == [key for key in before if key != "seed"]
    open_part(page, "Publishing")
    expect(page.locator("#f-webhook_config")).to_have_value("set")
    page.get_by_role("button", name="Replace").click()
    page.locator("#f-webhook_config").fill(SECRET.replace("old", "new"))
    save(page)
    assert saved(workspace)["webhook_config"].endswith("new")
    open_part(page, "Run")
    page.get_by_label("Batch Size", exact=True).fill("two")
    expect(page.locator("[data-key=train_batch_size] .bad")).to_contain_text(
        "is not a whole number"
    )


def test_nothing_is_lost_when_the_file_changed_meanwhile(page: Any, workspace: Workspace) -> None:
    page.get_by_label("Batch Size", exact=True).fill("4")
    workspace.write_config(train_batch_size=8, lora_rank=64)
    page.get_by_role("button", name="Save", exact=True).click()
    dialog = page.get_by_role("dialog", name="The file has changed")
    expect(dialog.get_by_role("row", name="train_batch_size")).to_have_text("train_batch_size84")
    expect(dialog.get_by_role("row", name="lora_rank")).to_have_text(
        "lora_rank64not changed by you"
    )
    dialog.get_by_role("button", name="Go on editing").click()
    expect(page.get_by_label("Batch Size", exact=True)).to_have_value("4")
    assert saved(workspace)["train_batch_size"] == 8
    page.get_by_role("button", name="Save", exact=True).click()
    dialog.get_by_role("button", name="Save mine over it").click()
    expect(page.locator("#save")).to_be_disabled()
    assert (saved(workspace)["train_batch_size"], saved(workspace)["lora_rank"]) == (4, 64)


@pytest.mark.parametrize("settings", [{**UNKNOWN, "hub_token": "hf_0123456789abcdefgh"}])
@pytest.mark.parametrize("way", ["Restore everything", "Save only mine as new", "Drop my changes"])
def test_config_deleted_meanwhile_loses_no_key(page: Any, workspace: Workspace, way: str) -> None:
    before = {key: value for key, value in saved(workspace).items() if key != "hub_token"}
    entries = json.loads(workspace.path("config/multidatabackend.json").read_text())
    workspace.path("config").rename(workspace.path("away"))
    page.get_by_label("Batch Size", exact=True).fill("4")
    page.get_by_role("button", name="Save", exact=True).click()
    dialog = page.get_by_role("dialog", name="The file was deleted or moved")
    expect(dialog).to_contain_text("config/config.json was deleted or moved")
    expect(dialog).to_contain_text("enter them again: hub_token.")
    dialog.get_by_role("button", name="Save only mine as new").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Give it a name")
    dialog.get_by_label("Name of a new config").fill("mine")
    dialog.get_by_role("button", name=way).click()
    expect(dialog).to_be_hidden()
    if way == "Drop my changes":
        expect(page.locator("#save")).to_be_disabled()
        assert not workspace.path("config").exists()
        return
    expect(page.locator("#saved")).to_have_text("Saved")
    if way == "Restore everything":
        assert saved(workspace) == before | {"train_batch_size": 4}
        assert json.loads(workspace.path("config/multidatabackend.json").read_text()) == entries
    else:
        expect(page.locator("#config")).to_have_value("mine")
        assert json.loads(workspace.path("config/mine/config.json").read_text()) == {
            "train_batch_size": 4
        }
        assert [path.name for path in workspace.path("config").rglob("*.json")] == ["config.json"]


def test_broken_config_is_repaired_as_text(page: Any, workspace: Workspace) -> None:
    workspace.path("config/torn").mkdir()
    workspace.path("config/torn/config.json").write_text('{"seed": ')
    page.goto(f"{page.url.partition('?')[0]}?config=torn")
    expect(page.locator("#config option", has_text="torn (broken)")).to_have_count(1)
    text = page.locator("#raw-config")
    expect(text).to_have_value('{"seed": ')
    told = page.locator("#raw-config + .told")
    expect(told).to_contain_text("is not valid JSON: it ends too early")
    expect(page.locator("#problems")).to_contain_text(
        "config.json is not valid JSON: it ends too early"
    )
    expect(page.locator("#problems li")).to_have_count(1)
    text.fill('["a list"]')
    expect(told).to_contain_text("It must be one JSON object")
    text.fill('{"seed": 9, "model_type": "lora", "lora_rank": "big"}')
    expect(told).to_be_empty()
    expect(page.locator("[data-key=lora_rank] .bad")).to_contain_text("is not a whole number")
    save(page)
    assert json.loads(workspace.path("config/torn/config.json").read_text())["seed"] == 9
    expect(page.locator("#config option", has_text="(broken)")).to_have_count(0)


def test_all_keys_are_edited_as_json(page: Any, workspace: Workspace) -> None:
    page.get_by_text("The files as JSON").click()
    text = page.locator("#raw-config")
    expect(text).not_to_have_value("")
    values = json.loads(text.input_value())
    assert values["my_own_key"] == {"kept": [1, 2]}
    text.fill(json.dumps({**values, "train_batch_size": 3, "my_own_key": 4}))
    expect(page.get_by_label("Batch Size", exact=True)).to_have_value("3")
    datasets = page.locator("#raw-datasets")
    datasets.fill(
        json.dumps([*json.loads(datasets.input_value()), {"id": "third", "type": "local"}])
    )
    open_part(page, "What")
    expect(page.locator(".dataset-card")).to_have_count(3)
    save(page)
    assert (saved(workspace)["my_own_key"], saved(workspace)["train_batch_size"]) == (4, 3)
    assert (
        json.loads(workspace.path("config/multidatabackend.json").read_text())[2]["id"] == "third"
    )


def test_address_and_run_follow_the_config(page: Any, workspace: Workspace) -> None:
    go(page, "Runs")
    expect(page.get_by_role("heading", level=1)).to_have_text("output")
    go(page, "Settings")
    page.get_by_role("button", name="New config").click()
    dialog = page.get_by_role("dialog", name="New config")
    refusals = {
        "": "Give it a name",
        "../evil": "Give it a name",
        "config": "There is a config config already.",
    }
    for name, refusal in refusals.items():
        dialog.get_by_label("Name, for").fill(name)
        dialog.get_by_role("button", name="Create", exact=True).click()
        expect(dialog.get_by_role("alert")).to_contain_text(refusal)
    dialog.get_by_label("Name, for").fill("second")
    dialog.get_by_role("button", name="Create", exact=True).click()
    expect(dialog).to_be_hidden()
    expect(page.locator("#config")).to_have_value("second")
    open_part(page, "Run")
    page.get_by_label("Output Folder", exact=True).fill("there")
    go(page, "Runs")
    # Start asks for unsaved changes, and saves nothing unless told to.
    page.locator(".run-main").get_by_role("button", name="Start", exact=True).click()
    dialog = page.get_by_role("dialog", name="There are unsaved changes")
    dialog.get_by_role("button", name="Cancel").click()
    assert not workspace.path("config/second").exists()
    assert not workspace.path("output").exists()
    go(page, "Settings")
    save(page)
    go(page, "Runs")
    expect(page.get_by_role("heading", level=1)).to_have_text("there")
    page.goto(page.url.replace("#run", "#basic"))
    page.reload()
    open_part(page, "Run")
    expect(page.get_by_label("Output Folder", exact=True)).to_have_value("there")
    expect(page.locator("#config")).to_have_value("second")
    # A project that has no config/config.json opens another one.
    workspace.path("config/config.json").unlink()
    page.goto(page.url.partition("?")[0] + "#basic")
    expect(page.locator("#config")).to_have_value("second")


def test_typed_text_survives_an_unreachable_server(browser: Any, workspace: Workspace) -> None:
    folder = workspace.folder.resolve()
    with ExitStack() as second, tab(browser) as page:
        with serving(folder) as (port, _):
            page.goto(f"http://127.0.0.1:{port}/#basic")
            expect(page.locator("#problems")).to_contain_text("my_own_key is not a known key.")
        page.get_by_label("Batch Size", exact=True).fill("two")
        expect(page.get_by_role("alert")).to_contain_text(
            "The server does not answer. What you typed is kept"
        )
        expect(page.locator("#problems li")).to_have_count(1)
        page.get_by_role("button", name="Save", exact=True).click()
        expect(page.locator("#saved")).to_have_text("Not saved: The server does not answer.")
        second.enter_context(serving(folder, port=port))
        expect(page.locator("#away")).to_be_hidden()
        expect(page.locator("[data-key=train_batch_size] .bad")).to_contain_text(
            "is not a whole number"
        )
        page.get_by_label("Batch Size", exact=True).fill("3")
        save(page)
    assert saved(workspace)["train_batch_size"] == 3


def test_a_copy_of_an_example_has_an_output_folder_of_its_own(
    page: Any, workspace: Workspace
) -> None:
    for name, folder in (("second", "output/second"), ("demo", "output/my-demo")):
        page.get_by_role("button", name="New config").click()
        dialog = page.get_by_role("dialog", name="New config")
        dialog.get_by_label("Name, for").fill(name)
        dialog.get_by_label("Start from").select_option("examples/demo")
        dialog.get_by_role("button", name="Create", exact=True).click()
        open_part(page, "Run")
        expect(page.get_by_label("Output Folder", exact=True)).to_have_value(folder)
        save(page)
        assert (
            json.loads(workspace.path(f"config/{name}/config.json").read_text())["output_dir"]
            == folder
        )


def test_datasets_are_edited_as_cards(page: Any, workspace: Workspace) -> None:
    workspace.path("datasets/others").mkdir()
    open_part(page, "What")
    card = page.locator(".dataset-card").first
    card.get_by_label("Repeats", exact=True).fill("-3")
    expect(card.locator("[data-key=repeats] .bad")).to_contain_text("-3")
    card.get_by_label("Repeats", exact=True).fill("3")
    expect(card.locator("[data-key=repeats] .bad")).to_have_count(0)
    card.get_by_role("button", name="Browse").click()
    dialog = page.get_by_role("dialog", name="Choose a folder")
    expect(dialog).to_contain_text("2 images")
    dialog.get_by_role("button", name="‹ up").click()
    dialog.get_by_role("button", name="others").click()
    expect(dialog.locator(".here")).to_have_text(str(workspace.path("datasets/others").resolve()))
    dialog.get_by_role("button", name="Use this folder").click()
    card.get_by_text("All keys as JSON").click()
    raw = card.get_by_label("The whole entry as JSON")
    entry = json.loads(raw.input_value())
    assert entry["instance_data_dir"].endswith("datasets/others")
    raw.fill(json.dumps({**entry, "_note": "mine", "instance_data_dir": "datasets/pictures"}))
    page.get_by_text("Text cache", exact=True).click()
    page.locator(".dataset-card").nth(1).get_by_label("Use", exact=True).uncheck()
    save(page)
    entries = json.loads(workspace.path("config/multidatabackend.json").read_text())
    assert (entries[0]["repeats"], entries[0]["_note"], entries[1]["disabled"]) == (3, "mine", True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("settings", [{"my_own_key": None}])
def test_plan_is_live_and_answers_what_if(no_gpu: None, page: Any, workspace: Workspace) -> None:
    workspace.path("datasets/pictures/torn.png").write_bytes(b"?")
    plan = page.get_by_role("complementary", name="Plan")
    expect(plan.locator("#verdict")).to_have_text("no GPU")
    expect(plan.locator(".bad")).to_contain_text("no GPU was found. On the CPU this takes about ")
    page.get_by_label("Plan for a card").fill("48")
    expect(plan).to_contain_text("a GPU with 48 GiB")
    expect(plan.locator("#verdict")).to_have_text("would fit")
    expect(page.locator("#plan.supposed")).to_be_visible()
    page.get_by_label("Plan for a card").fill("4")
    expect(plan.locator("#verdict")).to_have_text(re.compile(r"[\d.]+ GB too much"))
    expect(plan).to_contain_text("an RTX 3060, assumed")
    # Another card's problem is none of the config's, but its remedy may be taken.
    expect(plan.locator(".told .bad")).to_contain_text("This would fit")
    expect(page.locator("#problems")).not_to_contain_text(
        plan.locator(".told .bad").first.inner_text()[:40]
    )
    page.get_by_label("Plan for a card").fill("")
    expect(plan.locator("#verdict")).to_have_text("no GPU")
    page.evaluate("dispatchEvent(new Event('focus'))")
    open_part(page, "What")
    card = page.locator(".dataset-card").first
    expect(card.locator(".used")).to_have_text("2 of 3 files used")
    card.get_by_text("1 of 3 files not used").click()
    expect(card.locator(".ledger li")).to_contain_text("torn.png")


def test_a_remedy_is_applied_with_one_click_and_waits_to_be_saved(
    page: Any, workspace: Workspace
) -> None:
    page.get_by_role("button", name="Remove my_own_key").click()
    expect(page.locator("#problems")).not_to_contain_text("my_own_key")
    workspace.write_config(my_own_key=None)
    page.reload()
    page.get_by_label("Plan for a card").fill("12")
    told = page.locator("#plan .told p", has_text="This would fit: ")
    told.get_by_role("button", name="Apply").click()
    expect(page.locator("#verdict")).to_have_text("would fit")
    expect(told).to_have_count(0)
    page.locator("#search").fill("e")  # in every section
    changed = [each.get_attribute("data-key") for each in page.locator(".field.changed").all()]
    expect(page.locator("#saved")).to_have_text(f"{len(changed)} unsaved")
    assert not saved(workspace).keys() & set(changed)
    save(page)
    assert saved(workspace).keys() > set(changed) > set()
    expect(page.locator(".field.changed")).to_have_count(0)


def test_search_and_keys_reach_every_option(page: Any) -> None:
    expect(page.locator("#f-train_batch_size")).to_have_count(1)
    expect(page.locator("#f-huber_c")).to_have_count(0)  # sections are drawn when they are needed
    page.keyboard.press("/")
    page.keyboard.type("huber")
    expect(page.locator("#f-huber_c")).to_be_visible()
    expect(page.locator("#f-learning_rate")).to_be_hidden()
    for words, key in {
        "oom": "offload",
        "too strong": "learning_rate",
        "flicker": "crepa_enabled",
    }.items():
        page.locator("#search").fill(words)
        expect(page.locator(f"#f-{key}")).to_be_visible()
        expect(page.locator("#f-resolution")).to_be_visible(visible=words == "oom")
        expect(page.locator("#f-webhook_config")).to_be_hidden()
    page.locator("#search").fill("trigger word")
    expect(page.locator("#found .lead", has_text="Instance Prompt").first).to_be_visible()
    page.locator("#search").fill("no such option")
    expect(page.get_by_text("No option matches.")).to_be_visible()
    page.locator("#search").fill("")
    expect(page.locator("#f-huber_c")).to_be_hidden()
    page.set_viewport_size({"width": 400, "height": 800})
    page.get_by_label("Part of the settings").select_option("Training")
    expect(page.locator("#f-huber_c")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_search_shows_the_best_match_first_and_leads_back(page: Any) -> None:
    page.evaluate("scrollTo(0, 500)")
    search = page.locator("#search")
    for words, label in {"rank": "Rank", "learning rate": "Learning Rate"}.items():
        search.fill(words)
        expect(page.locator("#found .field").first.locator("label")).to_have_text(label)
    search.fill("block index")  # greyed without CREPA
    expect(page.locator("#found .field.greyed").last).to_be_visible()
    last = page.locator("#found .field").last
    expect(last).to_have_class(re.compile("greyed"))

    search.fill("")

    expect(page.locator("[id='basic/what']")).to_be_visible()
    assert page.evaluate("scrollY") == 500


def test_another_config_shows_nothing_of_the_last_one(page: Any, workspace: Workspace) -> None:
    second = workspace.path("config/second/config.json")
    second.parent.mkdir()
    second.write_text("{}")
    page.reload()
    page.get_by_label("Batch Size", exact=True).fill("two")
    expect(page.locator(".parts .count:visible")).to_have_count(1)
    page.locator("#save").click()
    expect(page.locator("#saved")).to_have_text("Saved")
    page.route("**/api/training/validate", lambda route: None)  # never answers

    page.locator("#config").select_option("second")

    expect(page.locator("#config")).to_have_value("second")
    expect(page.locator(".parts .count:visible")).to_have_count(0)
    expect(page.locator("#verdict")).to_be_empty()


def test_tread_is_none_a_quarter_or_a_half(page: Any, workspace: Workspace) -> None:
    open_part(page, "Training")
    routes = page.get_by_label("TREAD Routes", exact=True)
    expect(routes.locator("option")).to_contain_text(
        ["none (default)", "quarter: a quarter", "half: half of them"]
    )
    routes.select_option(index=2)
    save(page)
    route = {"selection_ratio": 0.5, "start_layer_idx": 2, "end_layer_idx": -2}
    assert saved(workspace)["tread_config"] == {"routes": [route]}
    workspace.write_config(tread_config={"routes": [{**route, "end_layer_idx": -3}]})
    page.reload()
    open_part(page, "Training")
    expect(routes.locator("option:checked")).to_contain_text('"end_layer_idx":-3')
    page.get_by_role("button", name="Use the default of TREAD Routes").click()
    save(page)
    assert "tread_config" not in saved(workspace)


def test_remote_files_are_fetched_with_a_button(browser: Any, workspace: Workspace) -> None:
    workspace.write_config(my_own_key=None)
    with serve() as site:
        workspace.write_datasets(
            [csv_entry(workspace, site.add("/a.png", picture(1))), DATASETS[1]]
        )
        with opened(browser, workspace.folder.resolve(), "#dataset") as page:
            card = page.locator(".dataset-card").first
            expect(card.locator(".told .bad")).to_contain_text("1 of 1 files are not fetched yet")
            assert not site.requests
            page.get_by_role("button", name="Fetch now").click()
            expect(card.locator(".used")).to_have_text("1 of 1 files used")
            expect(page.get_by_role("button", name="Fetch now")).to_have_count(0)
