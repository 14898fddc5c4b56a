"""Secrets that are given to the page: not in the list of processes, in no readable file, and copied
nowhere.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import Runs
from simpletuner.annexes.page.runs.queue import QUEUE_FILE
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.publishing.uploads import loaded_files
from simpletuner.annexes.runs.console import CONSOLE_FILE
from simpletuner.cli.settings import command_settings
from simpletuner.config.sources import SECRET_SETTINGS
from simpletuner.planning.lock import STARTED_FILE
from simpletuner.weights.lora_names import LORA_FILE
from tests.annexes.page.run_folder import write_lora
from tests.annexes.page.runs.test_results import page, project
from tests.tools.workspace import Workspace

__all__ = ["page", "project"]
SECRET = "hooks-5f0c1e77aa"
WEBHOOKS = [{"webhook_type": "raw", "callback_url": f"https://example.org/{SECRET}"}]
SETTINGS: dict[str, Any] = {"max_train_steps": 9, "webhook_config": WEBHOOKS}


@pytest.fixture(autouse=True)
def _generous_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def is_private(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == 0o600


def test_secrets_of_a_started_run_are_readable_by_its_user_only(
    page: TestClient, project: Workspace
) -> None:
    answer = page.post("/api/training/start", json={"config": "config", "settings": SETTINGS})
    assert answer.status_code == 202, answer.text
    runs: Runs = page.app.state.runs  # type: ignore[attr-defined]
    run = runs.find(answer.json()["run"])
    assert run.child is not None
    process = psutil.Process(run.child.pid)
    try:
        assert SECRET not in " ".join(process.cmdline())
        assert "--max_train_steps=9" in process.cmdline()
        assert (
            json.loads(json.loads(process.environ()[SECRET_SETTINGS])["webhook_config"]) == WEBHOOKS
        )
    finally:
        process.kill()
    assert is_private(run.folder / STARTED_FILE)
    assert SECRET not in (run.folder / CONSOLE_FILE).read_text()
    assert STARTED_FILE not in loaded_files(run.folder)
    assert run.settings == SETTINGS, "to continue with the same ones"


def test_a_queue_that_may_hold_secrets_is_private(page: TestClient, project: Workspace) -> None:
    project.path(QUEUE_FILE).write_text("[]")
    answer = page.post("/api/training/queue", json={"config": "config", "settings": SETTINGS})
    assert answer.status_code == 202, answer.text
    assert SECRET in project.path(QUEUE_FILE).read_text()
    assert is_private(project.path(QUEUE_FILE))


def test_a_new_run_does_not_copy_the_secrets_of_the_last(
    page: TestClient, project: Workspace
) -> None:
    output = project.path("output")
    output.mkdir()
    (output / STARTED_FILE).write_text(
        json.dumps({"config": "config", "settings": SETTINGS, "after": 0})
    )
    write_lora(output, 9)
    run = TestClient(create_app(Project(project.folder))).get("/api/training/status").json()["run"]
    answer = page.post("/api/training/new", json={"run": run, "name": "second"})
    assert answer.status_code == 201, answer.text
    written = project.path("config/second/config.json").read_text()
    assert SECRET not in written
    assert json.loads(written)["init_lora"] == str(output / LORA_FILE)
    assert json.loads(written)["max_train_steps"] == 9


def test_a_run_reads_the_secrets_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_SETTINGS, json.dumps({"webhook_config": "[]"}))
    assert command_settings(["--seed=1"]).settings == [("--seed", "1"), ("webhook_config", "[]")]
