"""What a card can train, shown before there is a file or a config."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from PIL import Image

from simpletuner.annexes.fitting.card_table import (
    ROWS,
    Answer,
    CardFit,
    CardRow,
    CardTable,
    answer,
    card_table,
)
from simpletuner.annexes.fitting.show_cards import table_json, table_lines
from simpletuner.cli.app import main
from simpletuner.config.device import AskedDevice, read_card_or_memory
from simpletuner.data.clip_writer import write_mp4
from simpletuner.errors import Problems
from simpletuner.reporting.layout import Layout

Capture = pytest.CaptureFixture[str]
LIGHT = ("Kandinsky 5 Video Lite", "full")  # a model of which less fits on a smaller card


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("simpletuner.budget.device.query_gpu", lambda: None)
    # A full fine-tune writes 300 GB, for which this machine may have no room.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1e12))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def row_of(model: str, kind: str) -> CardRow:
    [row] = [row for row in ROWS if (row.model, row.kind) == (model, kind)]
    return row


def card(name: str) -> AskedDevice:
    return read_card_or_memory(name, Problems())


def shown(capsys: Capture, *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", *arguments]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.fixture(scope="module")
def table() -> CardTable:
    """The table of one card, which takes seconds."""
    with patch("simpletuner.budget.device.query_gpu", return_value=None):
        return card_table(card("4090"))


def test_an_empty_folder_and_a_card_show_what_it_trains(here: Path, capsys: Capture) -> None:
    before = "torch" in sys.modules

    assert main(["plan", "--device", "rtx4090"]) == 0

    assert capsys.readouterr().out.startswith(
        "1,000 steps of each model, with previews, on RTX 4090"
    )
    assert ("torch" in sys.modules) == before
    assert list(here.iterdir()) == []


def test_the_table_fits_80_columns_and_names_what_is_assumed(table: CardTable) -> None:
    lines = list(table_lines(table, card("4090"), Layout(80)))

    assert lines[0] == "1,000 steps of each model, with previews, on RTX 4090 with 24 GiB:"
    assert [line for line in lines if line in {row.group for row in ROWS}] == [
        "Pictures",
        "Edits",
        "Clips",
        "Clips from a picture",
    ]
    assert max(map(len, lines)) <= 80
    assert any("assume the speed of RTX 4090" in line for line in lines)


def test_json_has_every_row_with_settings_to_begin_with(table: CardTable) -> None:
    document = json.loads(table_json(table))

    assert document["device"]["name"] == "RTX 4090 with 24 GiB"
    rows = {(row["model"], row["kind"]): row for row in document["rows"]}
    assert rows.keys() == {(row.model, row.kind) for row in ROWS if not row.is_tiny}
    begin = rows["Kandinsky 5 Video Lite", "LoRA"]["begin"]
    assert (begin["size"], begin["frames"]) == ("768x512", 61)
    assert begin["settings"]["offload"] == "auto"
    assert begin["seconds"] > 0
    assert begin["device"] < document["device"]["usable"]
    assert begin["host"] > 0


def test_json_of_an_unknown_card_is_an_error(capsys: Capture) -> None:
    assert main(["plan", "--json", "--device", "4091"]) == 2
    assert "Did you mean '4090'" in capsys.readouterr().err


def test_without_a_gpu_the_demo_comes_first_and_a_card_can_be_named(capsys: Capture) -> None:
    assert main(["plan"]) == 0

    output = capsys.readouterr().out
    assert output.startswith(
        "No GPU can be used here. For a card: `simpletuner plan --device 4090`"
    )
    assert output.index("Demo, a tiny model") < output.index("Kandinsky 5 Image")


CONSISTENT = [
    ("4060", "Kandinsky 5 Image", "LoRA"),
    ("3060", *LIGHT),
    ("4060-ti", "Sana Video 480p", "LoRA"),
    ("4090", "Kandinsky 5 Video Pro I2V", "LoRA"),
    ("5090", "Kandinsky 5 Image Edit", "LoRA"),
    ("h100", "Kandinsky 5 Image", "full"),
]


@pytest.mark.parametrize(("name", "model", "kind"), CONSISTENT)
def test_what_is_said_to_fit_fits_with_a_config_and_files(
    name: str, model: str, kind: str, here: Path, capsys: Capture
) -> None:
    row = row_of(model, kind)
    told = answer(row, card(name))

    for fit in (told.begin, told.largest):
        if fit is None:
            continue
        settings = write_run(here / fit.size.text, row, fit)
        planned = shown(capsys, f"example={row.example}", *settings, "--device", name)
        assert [bucket["size"] for bucket in planned["buckets"]] == [fit.size.text]
        assert planned["seconds"]["total"] == pytest.approx(fit.seconds)
        assert max(phase["device"] for phase in planned["memory"]) == pytest.approx(fit.on_device)
        assert max(phase["host"] for phase in planned["memory"]) == pytest.approx(fit.on_host)
    assert told.begin is not None


def write_run(folder: Path, row: CardRow, fit: CardFit) -> list[str]:
    """Files of the size of a fit, and a dataset file; returns settings for them."""
    entries = row.datasets_at(fit.size)
    for entry in entries:
        if "instance_data_dir" in entry:
            files = folder / entry["id"]
            entry["instance_data_dir"] = str(files)
            write_files(files, fit)
    file = folder / "multidatabackend.json"
    file.write_text(json.dumps(entries))
    settings: Mapping[str, Any] = {
        **row.settings_at(fit.size),
        "data_backend_config": file,
        "output_dir": folder / "output",
    }
    return [f"{key}={'null' if value is None else value}" for key, value in settings.items()]


def write_files(folder: Path, fit: CardFit) -> None:
    folder.mkdir(parents=True)
    width, height = map(int, fit.size.pixels.split("x"))
    rate = 16 if "x480" in fit.size.pixels else 24  # of Sana Video and of Kandinsky 5
    picture = Image.new("RGB", (width, height), "navy")
    for number in range(2):
        (folder / f"{number}.txt").write_text("a caption")
        if fit.size.frames > 1:
            write_mp4(folder / f"{number}.mp4", [picture] * fit.size.frames, rate)
        else:
            picture.save(folder / f"{number}.png")


def numbers(answer: Answer) -> int:
    """Pixels of the largest size that fits, over all frames; 0 if none does."""
    fit = answer.largest or answer.begin
    if fit is None:
        return 0
    width, height = map(int, fit.size.pixels.split("x"))
    return width * height * fit.size.frames


@pytest.mark.parametrize(
    ("model", "kind"), [LIGHT, ("Sana Video 720p", "LoRA"), ("Kandinsky 5 Image", "full")]
)
def test_more_memory_never_trains_a_smaller_size(model: str, kind: str) -> None:
    asked = [AskedDevice(device="4090", device_memory=size) for size in (8, 12, 16, 24, 32, 80)]

    sizes = [numbers(answer(row_of(model, kind), device)) for device in asked]

    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_what_does_not_fit_says_what_is_missing() -> None:
    told = answer(row_of("Kandinsky 5 Image", "full"), card("4060"))

    assert told.begin is None
    assert told.lacking.startswith("training at 512x512 needs ")
    assert "on the device, where 7.7 GB can be used" in told.lacking


def test_a_row_that_fits_only_smaller_says_what_the_usual_size_lacks() -> None:
    told = answer(row_of(*LIGHT), card("4060"))

    assert told.begin is not None
    assert told.begin.size.frames == 17
    assert "training at 768x512@61 needs " in told.lacking


def test_a_row_without_a_smaller_size_says_what_the_usual_size_lacks() -> None:
    row = row_of("Kandinsky 5 Image", "full")
    usual = replace(row, sizes={row.usual: row.sizes[row.usual]})

    told = answer(usual, card("4060"))

    assert told.begin is None
    assert told.lacking.startswith(f"training at {row.usual} needs ")


@pytest.mark.parametrize("variable", ["SIMPLETUNER_ENV", "CONFIG_PATH"])
def test_a_configuration_that_is_named_and_missing_is_an_error(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv(variable, "config/cats")

    assert main(["plan", "--device", "4090"]) == 2
    assert "config/cats" in capsys.readouterr().err


def test_configs_of_the_project_are_named_below_the_table(
    table: CardTable, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("simpletuner.cli.plan.card_table", lambda asked: table)
    assert main(["examples", "copy", "demo", "config/cats"]) == 0

    assert main(["plan", "--device", "4090"]) == 0
    assert capsys.readouterr().out.endswith("A run of this folder: `simpletuner plan env=cats`\n")


def test_a_setting_without_a_configuration_is_an_error(capsys: Capture) -> None:
    assert main(["plan", "lora_rank=8", "--device", "4090"]) == 2
    assert "no configuration was found" in capsys.readouterr().err


def test_a_word_that_is_no_setting_is_an_error(capsys: Capture) -> None:
    assert main(["plan", "kandinsky", "--device", "4090"]) == 2
    assert "kandinsky: is not a setting" in capsys.readouterr().err


def test_a_configuration_in_the_folder_is_planned(capsys: Capture) -> None:
    assert main(["examples", "copy", "kandinsky5-image-lora", "config"]) == 0
    capsys.readouterr()

    assert main(["plan", "--device", "4090"]) == 0
    output = capsys.readouterr().out
    assert "1,000 steps of each model" not in output
    assert "Estimate for RTX 4090" in output
