"""My card on the page: its table, a config to begin with, and the examples in words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.fitting.card_table import ROWS, CardTable, answer
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.serve import create_app
from simpletuner.budget.device import find_device
from simpletuner.cli.app import main
from simpletuner.config.device import AskedDevice
from simpletuner.config.sources import example_names
from tests.annexes.page.page import opened

SHOWN = {("Kandinsky 5 Video Lite", "full"), ("Sana Video 480p", "full")}
BEGIN = {"model": "Kandinsky 5 Video Lite", "kind": "full", "size": "768x512@17"}


@pytest.fixture(scope="module")
def small_table() -> CardTable:
    """Two rows on a card with 8 GB: one that fits smaller than usual, and one that does not fit."""
    asked = AskedDevice(device="4060")
    with patch("simpletuner.budget.device.query_gpu", return_value=None):
        device = find_device(card="4060")
        rows = [row for row in ROWS if (row.model, row.kind) in SHOWN]
        return CardTable(device, [answer(row, asked) for row in rows])


@pytest.fixture
def asked_cards(small_table: CardTable, monkeypatch: pytest.MonkeyPatch) -> list[AskedDevice]:
    """The cards whose table was asked for."""
    asked = []

    def stored(device: AskedDevice) -> CardTable:
        asked.append(device)
        return small_table

    monkeypatch.setattr("simpletuner.annexes.page.new.cards.card_table", stored)
    return asked


@pytest.fixture
def page(tmp_path: Path, asked_cards: list[AskedDevice]) -> TestClient:
    return TestClient(create_app(Project(tmp_path.resolve())))


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_the_first_page_computes_no_table(page: TestClient, asked_cards: list[AskedDevice]) -> None:
    assert page.get("/").status_code == 200
    assert asked_cards == []


@pytest.mark.parametrize("written", ["4060", "RTX 4060", "geforce-rtx-4060"])
def test_the_table_shows_sizes_that_fit_with_a_button_each(
    page: TestClient, asked_cards: list[AskedDevice], written: str
) -> None:
    answer = page.get("/cards", params={"card": written})

    assert answer.status_code == 200
    assert [device.device for device in asked_cards] == ["4060"]
    shown = text_of(answer.text)
    assert "1,000 steps, with previews, on RTX 4060 with 8 GiB" in shown
    assert "Kandinsky 5 Video Lite, full 768 × 512 17 " in shown
    assert "smaller than the usual 768x512, 61 frames: training at " in shown
    assert "Sana Video 480p, full does not fit" in shown
    assert re.findall(r'data-size="([^"]+)"', answer.text) == ["768x512@17"]
    assert "assume the speed of RTX 4060 with 8 GiB" in shown


def test_memory_in_gigabytes_is_a_card_too(
    page: TestClient, asked_cards: list[AskedDevice]
) -> None:
    page.get("/cards", params={"card": "24 GB"})
    page.get("/cards")

    assert [(device.device, device.device_memory) for device in asked_cards] == [
        (None, 24),
        (None, None),
    ]


def test_an_unknown_card_is_answered_with_the_nearest_and_without_flags(page: TestClient) -> None:
    answer = page.get("/cards", params={"card": "5090ti"})

    assert answer.status_code == 422
    [problem] = answer.json()["problems"]
    assert problem["message"].startswith("'5090ti' is not a known card. Did you mean '5090', ")
    assert "--" not in problem["message"]


def test_a_plan_for_an_unknown_card_is_answered_without_flags(page: TestClient) -> None:
    document = page.post("/api/plan", json={"device": "5090ti"}).json()

    [problem] = document["problems"]
    assert not document["ok"]
    assert problem["message"].startswith("'5090ti' is not a known card. Did you mean '5090', ")
    assert "--" not in problem["message"]


def test_begin_writes_a_config_that_its_plan_accepts(
    page: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("simpletuner.budget.device.query_gpu", lambda: None)
    answer = page.post("/api/cards/begin", json=BEGIN)

    assert (answer.status_code, answer.json()) == (
        201,
        {"config": "kandinsky5-video-lite-full-24gb"},
    )
    folder = tmp_path / "config" / "kandinsky5-video-lite-full-24gb"
    config = json.loads((folder / "config.json").read_text())
    assert config["offload"] == "auto"
    assert config["validation_num_video_frames"] == 17
    assert config["output_dir"] == "output/kandinsky5-video-lite-full-24gb"
    datasets = json.loads((folder / "multidatabackend.json").read_text())
    assert datasets[0]["video"]["num_frames"] == 17
    monkeypatch.chdir(tmp_path)
    assert main(["plan", f"env={folder.name}", "--device", "4060"]) == 0
    assert "clips of 17 frames of 768x512" in " ".join(capsys.readouterr().out.split())


def test_beginning_twice_keeps_the_first_config(page: TestClient, tmp_path: Path) -> None:
    for _ in range(2):
        page.post("/api/cards/begin", json=BEGIN)

    names = sorted(path.name for path in (tmp_path / "config").iterdir())
    assert names == ["kandinsky5-video-lite-full-24gb", "kandinsky5-video-lite-full-24gb-2"]


@pytest.mark.parametrize("wrong", [{"size": "9x9"}, {"model": "Flux"}, {"kind": ["LoRA"]}])
def test_a_row_that_is_not_in_the_table_is_refused(
    page: TestClient, tmp_path: Path, wrong: dict[str, Any]
) -> None:
    assert page.post("/api/cards/begin", json={**BEGIN, **wrong}).status_code == 422
    assert not (tmp_path / "config").exists()


def test_examples_are_grouped_and_told_in_words(page: TestClient) -> None:
    html = page.get("/new").text

    assert re.findall(r"<h3>([^<]+)</h3>", html) == ["Pictures", "Clips", "Try it"]
    assert sorted(re.findall(r'data-example="([^"]+)"', html)) == sorted(example_names())
    shown = text_of(html)
    assert "Kandinsky 5 Image: a subject or a style the usual choice; from 16 GB; " in shown
    assert "kandinsky5-video-lite-full-8gpu" not in shown


@pytest.mark.slow
@pytest.mark.usefixtures("asked_cards")
def test_a_card_that_is_typed_leads_to_a_config_that_is_open(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect = pytest.importorskip("playwright.sync_api", reason="needs Playwright").expect
    monkeypatch.chdir(tmp_path)
    with opened(browser, tmp_path.resolve()) as page:
        card = page.get_by_label("Card, or memory in GB")
        card.fill("5090ti")
        card.press("Enter")
        expect(page.locator("#cards-told")).to_contain_text("Did you mean '5090'")

        card.fill("4060")
        card.press("Enter")
        page.get_by_role(
            "button", name="Begin with Kandinsky 5 Video Lite, full, 768x512, 17 frames"
        ).click()

        expect(page.locator("#config")).to_have_value("kandinsky5-video-lite-full-24gb")
    assert (tmp_path / "config" / "kandinsky5-video-lite-full-24gb" / "config.json").is_file()
