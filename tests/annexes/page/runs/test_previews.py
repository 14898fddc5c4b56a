"""The previews of a run on its page: large, at any step, beside another step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.runs.previews import MOST_SHOTS, cells_at
from simpletuner.annexes.page.runs.previews import previews as previews_of
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.runs.run import Run
from simpletuner.reporting.metrics import MEDIA_FILE, MediaFile, MediaRecord
from tests.annexes.page.run_folder import RunFolder, State

STEP = re.compile(r'data-step="(\d+)"')


@pytest.fixture
def page(tmp_path: Path) -> TestClient:
    return TestClient(create_app(Project(tmp_path.resolve())))


def write(tmp_path: Path, rounds: int, state: State = "running", **more: Any) -> Path:
    run = RunFolder(False, "nothing", False, state, rounds=rounds, **more)
    return run.write(tmp_path)


def previews(page: TestClient, folder: Path, query: str = "") -> str:
    return page.get(f"/runs/{run_id(folder.resolve())}/previews?{query}").text


def large(text: str) -> list[str]:
    """The steps of the large previews."""
    return STEP.findall(text.partition('<div class="shots main">')[2].partition("<details")[0])


def test_the_newest_previews_are_large_and_any_step_can_be_chosen(
    page: TestClient, tmp_path: Path
) -> None:
    folder = write(tmp_path, rounds=5)

    assert large(previews(page, folder)) == ["4"]
    assert large(previews(page, folder, "step=2")) == ["2"]
    assert large(previews(page, folder, "step=99")) == ["4"], "not a step with previews"


def test_a_finished_run_shows_its_previews_beside_the_untrained_model(
    page: TestClient, tmp_path: Path
) -> None:
    folder = write(tmp_path, rounds=5, state="done")

    assert large(previews(page, folder)) == ["0", "4"]
    assert large(previews(page, folder, "beside=3")) == ["3", "4"]
    assert large(previews(page, folder, "beside=none")) == ["4"]


def test_the_step_to_compare_with_is_not_beside_itself(page: TestClient, tmp_path: Path) -> None:
    folder = write(tmp_path, rounds=5, state="done")

    assert large(previews(page, folder, "step=2&beside=2")) == ["2"]


def test_two_thousand_previews_are_one_slider_and_small_answers(
    page: TestClient, tmp_path: Path
) -> None:
    folder = write(tmp_path, rounds=2000)

    whole = previews(page, folder)
    dragged = previews(page, folder, "step=1234&only=shots")

    steps = re.search(r"data-steps='?\"?(\[.*?\])", whole)
    assert steps is not None
    assert json.loads(steps[1]) == list(range(2000))
    assert large(dragged) == ["1234"]
    assert len(whole) < 250_000
    assert len(dragged) < 150_000


def test_of_many_prompts_the_first_are_large_and_the_rest_are_counted(tmp_path: Path) -> None:
    media = MediaFile(tmp_path / MEDIA_FILE)
    for number in range(MOST_SHOTS + 2):
        media.append(MediaRecord(1, f"prompt-{number}", "a bird", f"{number}.png", 8, 8))
    media.close()

    shown = previews_of(Run("run", tmp_path), "", "")

    assert (len(shown["shots"]), shown["hidden"]) == (MOST_SHOTS, 2)


def test_trained_weights_come_before_their_moving_average(tmp_path: Path) -> None:
    records = [MediaRecord(1, "x", "a bird", "x.png", 8, 8, ema=ema) for ema in (True, False)]

    cells = cells_at(Run("run", tmp_path), records, 1)

    assert [cell.record.ema for cell in cells] == [False, True]


def test_clip_of_one_frame_has_a_mark_and_a_button(page: TestClient, tmp_path: Path) -> None:
    shown = previews(page, write(tmp_path, rounds=1, media="clips"))

    assert "<video " in shown
    assert 'class="tag clip-mark"' in shown
    assert 'aria-label="Play or pause validation"' in shown


def test_run_at_work_without_previews_says_so_and_a_finished_one_shows_nothing(
    page: TestClient, tmp_path: Path
) -> None:
    assert "None yet." in previews(page, write(tmp_path, rounds=1, media="nothing"))
    ended = previews(page, write(tmp_path, rounds=1, state="done", media="nothing"))
    assert ended.strip() == ""
