"""The start card in Chromium: from a drop, or by keyboard, to a run in a few interactions."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.page.new import start_card
from simpletuner.annexes.page.runs import control
from simpletuner.annexes.page.runs.control import Runs
from tests.annexes.page.new.test_start_card import files, zipped
from tests.annexes.page.page import go, opened
from tests.tools.web_server import picture

pytestmark = pytest.mark.slow(6)
expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright").expect
PLAN = {
    "ok": True,
    "problems": [],
    "device": {"name": "a GPU with 24 GiB", "usable": 25e9, "memory": 26e9, "note": ""},
    "memory": [{"phase": "training", "device": 20e9, "host": 1e9}],
    "length": {"steps": 1000, "steps_done": 0},
    "seconds": {"step": 2.4, "training": 2400, "previews": 60},
    "model": {"download": 2e9},
    "datasets": [],
    "disk": [],
    "buckets": [],
    "offload_auto": [],
    "proposals": {},
    "assumed": [],
}
DROP = """
(files) => {
  const data = new DataTransfer();
  const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  for (const [name, text] of files) data.items.add(new File([bytes(text)], name));
  const event = new DragEvent("drop", { dataTransfer: data, bubbles: true });
  document.querySelector("#drop").dispatchEvent(event);
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path.resolve()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of runs that the page starts, instead of running them; plans fit."""
    commands: list[list[str]] = []

    def spawn(
        runs: object, console: Path, arguments: list[str], secrets: object
    ) -> subprocess.Popen[bytes]:
        commands.append(arguments)
        return subprocess.Popen(["true"])

    async def plan(*given: object) -> tuple[str, str]:
        return json.dumps(PLAN), ""

    monkeypatch.setattr(Runs, "spawn", spawn)
    monkeypatch.setattr(control, "run_while_wanted", plan)
    return commands


class Hands:
    """A user's hands: what they do on a page is counted."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.count = 0

    def choose(self, label: str) -> None:
        self.count += 1
        self.page.get_by_label(label).check()

    def write(self, label: str, text: str) -> None:
        self.count += 1
        self.page.get_by_label(label).fill(text)

    def click(self, name: str) -> None:
        self.count += 1
        self.page.get_by_role("button", name=name, exact=True).click()


def test_training_starts_within_six_interactions(
    browser: Any, folder: Path, started: list[list[str]]
) -> None:
    dropped = [(f"{number}.png", picture(number)) for number in range(12)]
    dropped += [
        ("notes.pdf", b"?"),
        ("my cat.zip", zipped(("cat/20.png", picture(20)), ("cat/21.mp4", b"?"))),
    ]
    with opened(browser, folder) as page:
        expect(page.get_by_role("link", name="New")).to_have_attribute("aria-current", "page")
        expect(page.locator("#drop")).to_be_visible()
        page.evaluate(
            DROP, [(name, base64.b64encode(content).decode()) for name, content in dropped]
        )
        told = page.locator("#start-told")
        expect(told).to_contain_text("13 pictures, 80x64, none captioned.")
        expect(page.locator("#start-skipped li")).to_have_count(2)
        expect(page.locator("#start-skipped")).to_contain_text(
            "notes.pdf: is not a picture, a clip, a caption (.txt, .caption)"
        )
        expect(page.get_by_label("Kandinsky 5 Image")).to_have_count(1)
        expect(page.locator("#start-models")).to_contain_text(
            "fits, about 41 min with previews, up to 20 GB of memory, 2.0 GB to download"
        )
        hands = Hands(page)
        hands.choose("a style: how everything looks")
        hands.write("Name it", "qxz")
        hands.write("Name of the run", "old-maps")
        # No setting was chosen, so none is wrong.
        expect(page.locator(".parts .count:visible")).to_have_count(0)
        hands.click("Start")
        expect(page.get_by_role("heading", level=1)).to_have_text("old-maps")
    assert hands.count <= 6
    assert started == [["train", f"--config={folder / 'config/old-maps/config.json'}"]]
    config = json.loads((folder / "config/old-maps/config.json").read_text())
    assert "in the style of qxz" in config["validation_prompt"]
    assert len(files(folder / "datasets")) == 13


def test_captions_are_written_by_keys_from_a_drop_to_training_in_five_interactions(
    browser: Any, folder: Path, started: list[list[str]]
) -> None:
    dropped = [(f"{number}.png", picture(number)) for number in range(3)]
    with opened(browser, folder) as page:
        expect(page.locator("#drop")).to_be_visible()
        encoded = [(name, base64.b64encode(content).decode()) for name, content in dropped]
        page.evaluate(DROP, encoded)
        hands = Hands(page)
        hands.count += 1  # the drop
        hands.write("Name it", "zkt, a grey cat")
        hands.click("Write captions")
        expect(page.get_by_role("dialog", name="0.png")).to_be_visible()
        words = page.locator("#drop-words")  # its name follows the file
        expect(words.get_by_role("status")).to_have_text("1 of 3")
        for text in ("on a chair", "in the garden", "it sleeps"):
            page.keyboard.type(text)
            page.keyboard.press("Enter")
        expect(words.get_by_role("button", name="Start")).to_be_focused()

        page.keyboard.press("Enter")

        hands.count += 1
        expect(page.get_by_role("heading", level=1)).to_have_text("zkt")
    assert hands.count <= 5
    assert started == [["train", f"--config={folder / 'config/zkt/config.json'}"]]
    assert (folder / "datasets/zkt/1.txt").read_text() == "in the garden\n"
    entry = json.loads((folder / "config/zkt/multidatabackend.json").read_text())[0]
    assert (entry["instance_data_dir"], entry["caption_strategy"]) == ("datasets/zkt", "textfile")


def test_start_card_works_by_keyboard_and_reports_problems(
    browser: Any, folder: Path, started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("a.png", "b.png")):
        (folder / name).write_bytes(picture(number))
    (folder / "b.txt").write_text("on a chair")
    monkeypatch.setattr(start_card, "MOST_FILES", 2)
    with opened(browser, folder) as page:
        expect(page.locator("#drop")).to_be_visible()
        # From now on, so that the first key does not outrun it, choosers are intercepted.
        page.on("filechooser", lambda chooser: None)
        page.locator("#drop-files").focus()
        expect(page.locator("#drop-files")).to_be_focused()
        for names in (["a.png", "b.png", "b.txt"], ["a.png"], ["b.png", "b.txt"]):
            with page.expect_file_chooser() as chooser:
                page.keyboard.press("Space")
            chooser.value.set_files([folder / name for name in names])
            if len(names) == 3:
                expect(page.locator("#start-told")).to_contain_text("These are more than 2 files.")
            else:
                expect(page.locator("#start-told")).to_contain_text(
                    "1 picture" if len(names) == 1 else "2 pictures"
                )
        expect(page.locator("#start-captions")).to_contain_text("1 of 2 files have no caption")
        page.get_by_label("Name it").fill("zkt")
        page.get_by_label("Name of the run").fill("cats")
        page.get_by_role("button", name="Only write the config").click()
        expect(page.locator("#start-word-told")).to_contain_text("Say what zkt is, too")
        page.get_by_label("Name it").fill("zkt, a cat")
        page.get_by_role("button", name="Only write the config").click()
        ask = page.get_by_role("dialog", name="Leave so many files out?")
        expect(ask).to_contain_text("1 of 2 pictures would be left out: 1 without a caption.")
        ask.get_by_role("button", name="Start without them").click()
        expect(page.locator(".dataset-card:visible")).to_have_count(1)
        entry = json.loads((folder / "config/cats/multidatabackend.json").read_text())[0]
        assert (entry["caption_strategy"], entry["prepend_instance_prompt"]) == ("textfile", True)
        go(page, "New")
        page.locator("[data-example=demo]").click()
        dialog = page.get_by_role("dialog", name="New config")
        expect(dialog.get_by_label("Start from")).to_have_value("examples/demo")
    assert started == []
