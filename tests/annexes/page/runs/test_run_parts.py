"""The parts of a run's view, of every kind of run, and of runs with damaged files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs import table
from simpletuner.annexes.page.runs.control import run_id
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.payloads import EVENTS_FILE
from simpletuner.annexes.runs.console import CONSOLE_FILE
from simpletuner.planning.lock import LOCK_FILE, STARTED_FILE
from simpletuner.reporting.metrics import MEDIA_FILE, METRICS_FILE, REPORT_FILE
from simpletuner.weights.lora_names import LORA_FILE
from tests.annexes.page.run_folder import RunFolder, every_run

THOROUGH = pytest.mark.thorough
ADDRESSES = (
    "/api/training/status?run={0}",
    "/api/metrics/training/runs/{0}",
    "/api/events/recent?run={0}",
    "/report/{0}",
    "/download/{0}",
    "/download/{0}?step=2&form=comfyui",
)
PARTS = (
    "head",
    "advice",
    "results",
    "curves",
    "previews",
    "previews?step=3&beside=0&only=shots",
    "log",
)
COMPLETE = RunFolder(evaluated=True, saved="result", swept=True, state="done")
FILES = (
    EVENTS_FILE,
    METRICS_FILE,
    MEDIA_FILE,
    LOCK_FILE,
    CONSOLE_FILE,
    STARTED_FILE,
    REPORT_FILE,
    LORA_FILE,
    "checkpoint-2/manifest.json",
    f"checkpoint-2/{LORA_FILE}",
    "sweep/sheet.json",
    "sweep/losses.json",
    "sweep/cells/2.png",
    "samples/owl.json",
    "samples/owl.png",
    "previews/3.png",
)


@pytest.fixture
def page(tmp_path: Path) -> TestClient:
    return TestClient(create_app(Project(tmp_path.resolve())))


def parts_of(page: TestClient, folder: Path) -> dict[str, str]:
    """The parts of a run, none of which fails to answer; nor does anything else that is asked of
    it.
    """
    run = run_id(folder.resolve())
    for address in ADDRESSES:
        assert page.get(address.format(run)).status_code < 500, (folder.name, address)
    parts = {}
    for part in PARTS:
        answer = page.get(f"/runs/{run}/{part}")
        assert answer.status_code == 200, (folder.name, part, answer.text)
        parts[part] = answer.text
    return parts


def missing(path: Path) -> None:
    path.unlink(missing_ok=True)


def a_folder_in_its_place(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def torn(path: Path) -> None:
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before[: len(before) * 2 // 3])


def with_a_torn_line(path: Path) -> None:
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(b'{"step": 3, "loss/val/he\n' + before + b'{"step": 4, "loss')


def with_noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 3)


def with_values_of_other_types(path: Path) -> None:
    row = (
        b'{"step": "three", "strength": [1], "id": {}, "path": null, "losses": "none", '
        b'"width": -1}\n'
    )
    path.write_bytes(row)


@pytest.mark.slow(2)
def test_every_part_of_every_kind_of_run_is_shown(page: TestClient, tmp_path: Path) -> None:
    for run in every_run():
        parts = parts_of(page, run.write(tmp_path))
        assert "This part cannot be shown" not in "".join(parts.values()), run.name
        assert ("<h2>Result</h2>" in parts["results"]) == (run.saved != "nothing"), run.name
        assert ("<h2>Checkpoints compared</h2>" in parts["results"]) == run.swept, run.name
        # The best weights are marked, if their step has a column: the comparison has step 2, and
        # the previews have step 3, which is the last one.
        is_saved = run.state == "stopped" and run.media != "nothing"
        has_last = run.saved == "result" or (run.saved == "checkpoint" and is_saved)
        is_shown = run.saved != "nothing" and has_last != run.swept
        assert (">lowest loss<" in parts["results"]) == (run.evaluated and is_shown), run.name


@pytest.mark.parametrize(
    "damage",
    [
        torn,
        with_values_of_other_types,
        pytest.param(missing, marks=THOROUGH),
        pytest.param(a_folder_in_its_place, marks=THOROUGH),
        pytest.param(with_a_torn_line, marks=THOROUGH),
        pytest.param(with_noise, marks=THOROUGH),
    ],
)
def test_damaged_file_affects_only_parts_that_need_it(
    page: TestClient, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    whole = COMPLETE.write(tmp_path / "whole")
    for number, file in enumerate(FILES):
        folder = tmp_path / f"run-{number}"
        shutil.copytree(whole, folder)
        damage(folder / file)
        parts = parts_of(page, folder)
        assert "<h2>Result</h2>" in parts["results"], file
        assert "<h2>Samples</h2>" in parts["results"] or file.startswith("samples"), file


def test_a_damaged_sweep_is_named_in_its_place(page: TestClient, tmp_path: Path) -> None:
    folder = COMPLETE.write(tmp_path)
    torn(folder / "sweep/sheet.json")
    shown = parts_of(page, folder)["results"]
    assert f"This part cannot be shown. {folder}/sweep/sheet.json is damaged" in shown


@pytest.mark.parametrize("swept", [False, True])
def test_sweep_of_an_earlier_version_is_named(
    page: TestClient, tmp_path: Path, swept: bool
) -> None:
    folder = replace(COMPLETE, swept=swept).write(tmp_path)
    earlier = Path("samples") / f"sweep-{folder.name}" / "sheet.html"
    (tmp_path / earlier).parent.mkdir(parents=True)
    (tmp_path / earlier).write_text("a sheet")

    shown = parts_of(page, folder)["results"]

    assert (str(earlier) in shown) == (not swept)


@pytest.mark.parametrize(("file", "part"), [(METRICS_FILE, "head"), (MEDIA_FILE, "previews")])
def test_damaged_lines_of_a_record_are_named_and_the_others_shown(
    page: TestClient, tmp_path: Path, file: str, part: str
) -> None:
    folder = COMPLETE.write(tmp_path)
    with_a_torn_line(folder / file)
    shown = parts_of(page, folder)
    assert (
        f"{file}: line 1 is damaged and skipped" in shown[part]
        or f"{file} has an invalid line" in shown[part]
    )
    assert "previews/3.png" in shown["previews"]


def test_failed_part_shows_its_reason_in_place(
    page: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("min() arg is an empty sequence")

    folder = COMPLETE.write(tmp_path)
    monkeypatch.setattr(table, "samples_in", fail)
    shown = parts_of(page, folder)["results"]
    assert "<h2>Samples</h2>" in shown
    assert "This part cannot be shown. ValueError: min() arg is an empty sequence." in shown
    assert "Download" in shown
    assert "Checkpoints compared" in shown


def test_unreadable_file_is_named(
    page: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = COMPLETE.write(tmp_path)
    page.get("/runs")

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder / METRICS_FILE))

    monkeypatch.setattr("simpletuner.annexes.runs.log_files.Tail.lines", fail)
    answer = page.get(f"/api/metrics/training/runs/{run_id(folder)}")
    assert answer.status_code == 422
    assert f"{METRICS_FILE} cannot be read: Permission denied." in answer.text
