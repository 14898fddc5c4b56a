"""The sentence on what to do next, on the page of its run."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.serve import create_app
from simpletuner.weights.lora_names import LORA_FILE
from tests.annexes.page.run_folder import write_lora
from tests.tools.records import MadeRecord

RISING = {50: 1.64, 100: 1.42, 150: 1.31, 200: 1.25, 250: 1.27, 300: 1.31, 350: 1.36, 400: 1.42}
FALLING = {50: 1.64, 100: 1.52, 150: 1.44, 200: 1.37, 250: 1.31, 300: 1.26, 350: 1.22, 400: 1.18}


@pytest.fixture
def page(tmp_path: Path) -> TestClient:
    """The page of a project whose config `cats` writes to output/cats."""
    (tmp_path / "config" / "cats").mkdir(parents=True)
    config = tmp_path / "config" / "cats" / "config.json"
    config.write_text('{"output_dir": "output/cats"}')
    return TestClient(create_app(Project(tmp_path.resolve())))


def advice(page: TestClient, folder: Path) -> str:
    answer = page.get(f"/runs/{run_id(folder.resolve())}/advice")
    assert answer.status_code == 200
    return answer.text


def test_the_page_offers_the_checkpoint_to_take(page: TestClient, tmp_path: Path) -> None:
    folder = MadeRecord(held_out=RISING).write(tmp_path / "output" / "cats")
    write_lora(folder / "checkpoint-200", 200)

    shown = advice(page, folder)

    assert "Take checkpoint 200: the loss on held-out files has risen since" in shown
    assert f'href="/download/{run_id(folder.resolve())}?step=200"' in shown


def test_a_checkpoint_without_a_file_is_not_offered(page: TestClient, tmp_path: Path) -> None:
    folder = MadeRecord(held_out=RISING).write(tmp_path / "output" / "cats")
    assert not (folder / "checkpoint-200" / LORA_FILE).exists()

    shown = advice(page, folder)

    assert "Take checkpoint 200" in shown
    assert "/download/" not in shown


def test_the_page_continues_to_the_step_of_the_sentence(page: TestClient, tmp_path: Path) -> None:
    folder = MadeRecord(held_out=FALLING).write(tmp_path / "output" / "cats")

    shown = advice(page, folder)

    assert "Continue to step 600: the loss on held-out files was still falling" in shown
    assert '<input type="number" name="steps" value="600" hidden' in shown


def test_the_page_opens_the_settings_of_the_run(page: TestClient, tmp_path: Path) -> None:
    folder = MadeRecord(changes=(0,), rate=1e-5).write(tmp_path / "output" / "cats")

    shown = advice(page, folder)

    assert "Raise the learning rate" in shown
    assert 'href="?config=cats#training"' in shown


def test_a_run_without_a_sentence_has_an_empty_part(page: TestClient, tmp_path: Path) -> None:
    folder = MadeRecord().write(tmp_path / "output" / "cats")

    assert advice(page, folder).strip() == ""


def test_the_result_and_the_sentence_name_the_same_checkpoint(
    page: TestClient, tmp_path: Path
) -> None:
    folder = MadeRecord(held_out=RISING).write(tmp_path / "output" / "cats")
    for step in (100, 200, 300, 400):
        write_lora(folder / f"checkpoint-{step}", step)
    write_lora(folder, 400)

    shown = page.get(f"/runs/{run_id(folder.resolve())}/results").text

    assert "Take checkpoint 200" in advice(page, folder)
    result = shown.partition("<h2>Result</h2>")[2].partition("</section>")[0]
    assert "tep 200</b>" in result
    assert "the lowest held-out loss" in result


def test_the_sentence_does_not_repeat_the_head(page: TestClient, tmp_path: Path) -> None:
    """The head of an interrupted run says from where it continues, and has the button."""
    folder = MadeRecord(total=800, end="interrupted").write(tmp_path / "output" / "cats")

    assert advice(page, folder).strip() == ""
