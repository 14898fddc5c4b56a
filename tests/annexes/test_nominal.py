"""A plan for a card, in a folder without files to train."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpletuner.cli.app import main

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("example", "files"),
    [
        ("kandinsky5-image-lora", "'datasets/my_images' does not exist yet: this is the plan for 10 pictures"),
        ("kandinsky5-image-edit-lora", "'datasets/after', 'datasets/before' do not exist yet"),
        ("kandinsky5-video-lite-lora", "10 clips of 61 frames"),
        ("sanavideo-lora", "10 clips of 81 frames"),
    ],
)
def test_whether_a_model_fits_a_card_is_answered_without_files(
    example: str, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", f"example={example}", "--device=h100"]) == 0
    told = capsys.readouterr().out
    assert files in told.splitlines()[0]
    assert "Estimate for H100" in told
    assert [*tmp_path.iterdir()] == []


def test_files_that_are_there_are_planned_and_a_plan_for_this_machine_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "example=demo", "--device=4090"]) == 0
    assert "does not exist" not in capsys.readouterr().out
    assert main(["plan", "example=kandinsky5-image-lora"]) == 2
    assert "'datasets/my_images'" in capsys.readouterr().err


def test_a_wrong_card_is_named_before_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "example=kandinsky5-image-lora", "--device=h10", "--device-memory=80"]) == 2
    told = capsys.readouterr().err
    assert "--device: 'h10' is not one of" in told
    assert "datasets/my_images" not in told
