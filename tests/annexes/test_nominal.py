"""A plan for a card, in a folder without files to train."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simpletuner.cli.app import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("example", "files"),
    [
        (
            "kandinsky5-image-lora",
            "'datasets/my_images' does not exist yet: this is the plan for 10 pictures",
        ),
        ("kandinsky5-image-edit-lora", "'datasets/after', 'datasets/before' do not exist yet"),
        ("kandinsky5-video-lite-lora", "10 clips of 61 frames"),
        ("sanavideo-lora", "10 clips of 81 frames"),
    ],
)
def test_plan_for_a_card_needs_no_files(
    example: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["plan", f"example={example}", "--device=h100"]) == 0
    output = capsys.readouterr().out
    assert files in output.splitlines()[0]
    assert "Estimate for H100" in output
    assert [*tmp_path.iterdir()] == []


def test_plan_for_this_machine_needs_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)

    assert main(["plan", "example=demo", "--device=4090"]) == 0
    assert "does not exist" not in capsys.readouterr().out

    assert main(["plan", "example=kandinsky5-image-lora"]) == 2
    assert "'datasets/my_images'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "video", ["short", {"num_frames": "many"}, {"num_frames": -5, "frame_rate": "fast"}, None]
)
def test_invalid_settings_of_a_dataset_that_does_not_exist_are_reported(
    video: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["examples", "copy", "sanavideo-lora", "mine"]) == 0
    [file] = tmp_path.rglob("multidatabackend.json")
    entries = json.loads(file.read_text())
    file.write_text(json.dumps([{**entries[0], "video": video}, *entries[1:]]))
    capsys.readouterr()

    code = main(["plan", "env=mine", "--device=h100"])

    assert code in (0, 2)
    if code == 2:
        assert "video" in capsys.readouterr().err


def test_plan_for_a_card_writes_no_files_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert main(["examples", "copy", "kandinsky5-image-lora", "mine"]) == 0
    [file] = tmp_path.rglob("multidatabackend.json")
    entries = json.loads(file.read_text())
    file.write_text(json.dumps([{**entries[0], "id": str(elsewhere)}, *entries[1:]]))

    main(["plan", "env=mine", "--device=h100"])

    assert list(elsewhere.iterdir()) == []


def test_unknown_card_is_reported_before_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)

    assert (
        main(["plan", "example=kandinsky5-image-lora", "--device=h10", "--device-memory=80"]) == 2
    )
    errors = capsys.readouterr().err
    assert "--device: 'h10' is not a known card. Did you mean 'h100'" in errors
    assert "datasets/my_images" not in errors
