"""Runs of version 0.1.0 in this version: continued, sampled, compared, replayed and listed.

The runs are those of `tests/tools/earlier_runs.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.configure.session import load_values
from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.serve import create_app
from simpletuner.config.absent import removed_keys
from simpletuner.config.records import LAST_WITH, trained_with_removed, without_removed
from simpletuner.config.schema import option_names
from simpletuner.errors import Problems
from tests.tools.earlier_runs import PLAIN_FAILURE, unpack_earlier_runs
from tests.tools.workspace import Workspace

LAYERSYNC_FAILURE = "runs/layersync/failures/step-5"
CONFIG = f"{PLAIN_FAILURE}/config.json"
PLAIN_RECORD = "runs/plain/checkpoint-4/config.json"
REMOVED = (
    "speed_fused_lora, layersync_enabled, layersync_student_block, layersync_teacher_block were "
    "removed in 0.2.0"
)
LAYERSYNC_LORA = "runs/layersync/checkpoint-4/pytorch_lora_weights.safetensors"

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def old(tmp_path: Path) -> Workspace:
    return unpack_earlier_runs(tmp_path)


def test_a_run_without_removed_features_continues(old: Workspace, capsys: Capture) -> None:
    assert old.train("--config", CONFIG, "max_train_steps=5") == 0

    shown = capsys.readouterr().out
    assert "Continuing from checkpoint-4" in shown
    assert "layersync_enabled: was removed in 0.2.0: " in shown
    assert [row["step"] for row in old.metrics("runs/plain")] == [1, 2, 3, 4, 5]


def test_a_run_trained_with_removed_features_is_refused(old: Workspace, capsys: Capture) -> None:
    before = sorted(old.path("runs/layersync").rglob("*"))

    assert old.train("--config", CONFIG, "output_dir=runs/layersync") == 2

    error = capsys.readouterr().err
    cause = "checkpoint-4 was trained with speed_fused_lora true, layersync_enabled true, removed"
    assert f"{cause} in 0.2.0." in error
    assert f"Finish that run with simpletuner {LAST_WITH}" in error
    assert f"another output_dir, and init_lora={LAYERSYNC_LORA}" in error
    assert sorted(old.path("runs/layersync").rglob("*")) == before


def test_a_new_run_can_start_from_the_weights_of_a_refused_run(old: Workspace) -> None:
    settings = ("output_dir=runs/new", f"init_lora={LAYERSYNC_LORA}")

    assert old.run("plan", "--config", CONFIG, *settings) == 0


def test_sampling_an_old_result_names_removed_keys_once(old: Workspace, capsys: Capture) -> None:
    assert old.run("sample", "runs/layersync", "--prompt", "a big glimmer") == 0

    assert capsys.readouterr().out.count(REMOVED) == 1
    assert len(list(old.path("samples").glob("*.png"))) == 1


def test_a_sweep_of_old_checkpoints_names_removed_keys_once(
    old: Workspace, capsys: Capture
) -> None:
    assert old.run("sweep", "runs/layersync") == 0

    assert capsys.readouterr().out.count(REMOVED) == 1
    assert old.path("runs/layersync/sweep/sheet.png").is_file()


def test_a_failed_step_of_an_old_run_can_be_replayed(old: Workspace, capsys: Capture) -> None:
    assert old.train("--replay", PLAIN_FAILURE) == 0

    assert "Step 5 does not fail this time." in capsys.readouterr().out


def test_a_failed_step_that_needs_removed_features_is_not_replayed(
    old: Workspace, capsys: Capture
) -> None:
    assert old.train("--replay", LAYERSYNC_FAILURE) == 2

    error = capsys.readouterr().err
    assert f"Finish that run with simpletuner {LAST_WITH}" in error


@pytest.fixture
def page(old: Workspace) -> TestClient:
    """The page of a folder that has the configs of both runs, too."""
    for name, failure in (("plain", PLAIN_FAILURE), ("layersync", LAYERSYNC_FAILURE)):
        old.path(f"config/{name}").mkdir()
        shutil.copy(old.path(f"{failure}/config.json"), old.path(f"config/{name}/config.json"))
    return TestClient(create_app(Project(old.folder)))


def test_the_page_lists_old_runs_with_their_steps(page: TestClient) -> None:
    runs = page.get("/api/metrics/training/runs").json()

    steps = {run["config"]["name"]: run["progress"]["current"] for run in runs}
    assert steps == {"plain": 4, "layersync": 4}


def test_the_page_starts_a_new_run_from_old_weights_without_removed_keys(
    page: TestClient, old: Workspace
) -> None:
    runs = page.get("/api/metrics/training/runs").json()
    (run,) = [run for run in runs if run["config"]["name"] == "layersync"]

    response = page.post("/api/training/new", json={"run": run["run"], "name": "again"})

    assert response.status_code == 201, response.text
    settings = json.loads(old.path("config/again/config.json").read_text())
    assert not {"layersync_enabled", "speed_fused_lora"} & settings.keys()
    assert settings["init_lora"].endswith("runs/layersync/pytorch_lora_weights.safetensors")


def test_the_config_editor_leaves_out_removed_keys(old: Workspace) -> None:
    values = load_values(old.path(f"{LAYERSYNC_FAILURE}/config.json"), Problems())

    assert not {"layersync_enabled", "speed_fused_lora"} & values.keys()
    assert values["lora_rank"] == 1


def test_a_refused_full_fine_tune_names_its_transformer_as_the_start_of_a_new_run(
    old: Workspace, capsys: Capture
) -> None:
    checkpoint = old.path("runs/layersync/checkpoint-4")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["identity"]["model_type"] = "full"
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))

    assert old.train("--config", CONFIG, "output_dir=runs/layersync", "model_type=full") == 2

    start = "pretrained_transformer_model_name_or_path=runs/layersync/checkpoint-4."
    assert start in capsys.readouterr().err


def test_every_recorded_key_is_an_option_or_listed_as_removed(old: Workspace) -> None:
    """The values of removed keys ask for nothing in this run, so it can be continued."""
    recorded = json.loads(old.path(PLAIN_RECORD).read_text())
    removed = removed_keys("config")

    for key in recorded.keys() - option_names():
        assert key in removed
        assert removed[key].asks_for_nothing(recorded[key]), key


def test_removed_keys_and_values_are_left_out_of_a_record() -> None:
    recorded = {"optimizer": "soap", "lora_rank": 4, "--layersync-enabled": True}
    report = Problems()

    kept = without_removed(recorded, "config.json", report)

    assert kept == {"lora_rank": 4}
    (problem,) = report
    message = "optimizer soap, layersync_enabled were removed in 0.2.0 and left out."
    assert str(problem) == f"config.json: {message}"


def test_removed_keys_that_were_off_are_left_out_silently(old: Workspace) -> None:
    recorded = json.loads(old.path(PLAIN_RECORD).read_text())
    report = Problems()

    kept = without_removed(recorded, "config.json", report)

    assert not removed_keys("config").keys() & kept.keys()
    assert report == []


@pytest.mark.parametrize(
    ("recorded", "needed"),
    [
        ({"optimizer": "soap"}, ["optimizer soap"]),
        ({"mixflow_enabled": True, "mixflow_gamma": 0.9}, ["mixflow_enabled true"]),
        ({"mixflow_enabled": False, "mixflow_gamma": 0.9}, []),
        ({"validation_adapter_path": "owner/style"}, []),
        ({"optimizer": "adamw", "seed": 1}, []),
    ],
)
def test_only_removed_features_that_changed_training_are_needed(
    recorded: dict[str, Any], needed: list[str]
) -> None:
    assert trained_with_removed(recorded) == needed
