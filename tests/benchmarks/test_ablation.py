"""The ablation at its smallest: two runs of one step, kept when it is started again, and its table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import ablation
from benchmarks.ablation import Cell, Line
from simpletuner.cli.app import main


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cells run in this process, with short previews; their names."""
    names: list[str] = []

    def here(lab: ablation.Lab, name: str, words: list[str]) -> None:
        names.append(name)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["ablation", "--folder", str(lab.folder), *words])
            ablation.main()

    two = {name: ablation.ROWS[name] for name in ("plain", "tread")}
    monkeypatch.setattr(ablation, "ROWS", two)
    monkeypatch.setattr(ablation, "TIMED", 1)
    monkeypatch.setattr(ablation, "UNTIMED", 0)
    monkeypatch.setattr(ablation, "PREVIEW_STEPS", 2)
    monkeypatch.setattr(ablation, "EVAL_TIMESTEPS", 1)
    monkeypatch.setattr(ablation, "in_its_own_process", here)
    monkeypatch.chdir(tmp_path)
    return names


def test_what_is_finished_is_kept_and_stands_in_the_table(
    run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- ablation -->\nold\n<!-- end -->\nafter\n")
    words = ["ablation", "--demos", "image", "--only", "tread", "--seeds", "3", "--steps", "1", "--rounds", "1"]
    words += ["--folder", str(tmp_path / "runs"), "--json", str(tmp_path / "rows.json"), "--docs", str(page)]
    monkeypatch.setattr(sys, "argv", words)
    ablation.main()
    assert run == ["image-plain-3-1", "image-tread-3-1", "times-image"]
    ablation.main()
    assert len(run) == 3
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["plain", "tread"]
    assert rows[0]["time"] == [1.0]
    assert all(row["loss"][0] > 0 for row in rows)
    assert rows[1]["time"][0] > 0
    text = page.read_text()
    assert text.startswith("before\n<!-- ablation -->\ndemo, 1 steps, 1 seeds\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "| tread |" in text
    assert "| tread |" in capsys.readouterr().out


def test_a_cell_is_its_demo_without_regularisation_and_with_two_samples_apart(tmp_path: Path) -> None:
    lab = ablation.Lab(tmp_path)
    for row, count in (("plain", 3), ("regularisation", 4)):
        config = json.loads(lab.write_config(Cell("video", row, 5, 9)).read_text())
        datasets = json.loads(Path(config["data_backend_config"]).read_text())
        assert (config["seed"], config["max_train_steps"]) == (5, 9)
        assert len(datasets) == count
        trained, apart = ({path.name for path in Path(each["instance_data_dir"]).iterdir()} for each in datasets[:2])
        assert (len(trained), len(apart)) == (12, 4)
        assert not trained & apart


@pytest.mark.parametrize("row", ablation.ROWS)
def test_the_plan_accepts_every_row(row: str, tmp_path: Path) -> None:
    lab = ablation.Lab(tmp_path)
    for demo in ablation.ROWS[row].demos:
        config = lab.write_config(Cell(demo, row, 0, 9))
        assert main(["plan", "--config", str(config)]) == 0


def test_scores_are_those_of_the_demos(tmp_path: Path) -> None:
    star = np.full((40, 40, 3), 255, np.uint8)
    star[10:20, 10:30], star[20:25, 10:30] = ablation.PURPLE, ablation.YELLOW
    Image.fromarray(star).save(tmp_path / "star.png")
    Image.fromarray(255 - star).save(tmp_path / "other.png")
    assert ablation.star_score(tmp_path / "star.png") == pytest.approx(1 / 3)
    assert ablation.pixel_change(tmp_path / "star.png", tmp_path / "star.png") == 0
    assert ablation.pixel_change(tmp_path / "star.png", tmp_path / "other.png") > 100
    clip = next(ablation.EXAMPLES.glob("demo-video/clips/*.mp4"))
    assert ablation.hop_score(clip) == pytest.approx(14, abs=1)
    assert ablation.path_change(clip, clip) == 0


def test_one_seed_has_no_spread() -> None:
    line = Line("image", "tread", [0.5], [0.125], [0.25], [1.0], [1.0])
    assert "| tread | 0.500 | +0.125 | 0.25 | 1.00 | 1.00 |" in ablation.table([line], 7)
    assert ablation.spread([-1.0, 3.0], 1, "+") == "+1.0 (-1.0 to +3.0)"
