"""A run or config that is broken is shown as broken, with the reason, and has no effect on the
others.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.payloads import EVENTS_FILE
from simpletuner.planning.lock import LOCK_FILE, STARTED_FILE
from simpletuner.reporting.events import StateChanged
from simpletuner.reporting.metrics import METRICS_FILE
from tests.annexes.page.page import opened
from tests.annexes.page.runs.test_runs import STEPS, own, tell

Damage = Callable[[Path], object]


COUNTS = {"current": 4, "total": 9, "percent": 44.4, "eta_seconds": 1.0}


def lines(name: str, *texts: str) -> Damage:
    """Lines that something else has added to a file of the run."""

    def add(folder: Path) -> None:
        with (folder / name).open("a") as file:
            file.write("".join(f"{text}\n" for text in texts))

    return add


def event(**changes: Any) -> Damage:
    whole = {
        "id": 99,
        "job_id": "x",
        "type": "training.status",
        "data": {"status": "running"},
        "progress": {},
    }
    return lines(EVENTS_FILE, json.dumps({**whole, **changes}))


def pipe(name: str) -> Damage:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


KINDS: dict[str, tuple[Damage, str]] = {
    "a step that is a text": (lines(METRICS_FILE, '{"step": "abc"}'), '{"step": "abc"}'),
    "a step that is too large": (
        lines(METRICS_FILE, f'{{"step": {10**30}}}'),
        "has an invalid line",
    ),
    "an event without numbers": (event(progress={"current": "abc"}), '"abc"'),
    "an event that is something else": (
        event(stage=[1], type="lifecycle.stage"),
        "has an invalid line",
    ),
    "an event without a session": (lines(EVENTS_FILE, '{"id": 7}'), '{"id": 7}'),
    "an endless nesting": (lines(EVENTS_FILE, "[" * 100_000), "has an invalid line"),
    "a line without an end": (lines(EVENTS_FILE, "x" * 400_000), "has an invalid line"),
    "what cannot be sent": (
        event(progress=COUNTS | {"metrics": {"odd": math.nan}}),
        "not JSON compliant",
    ),
    "half a character": (
        event(data={"status": "completed"}, progress=COUNTS, message="\ud800"),
        "surrogates",
    ),
    "a name without an end": (lines(METRICS_FILE, json.dumps({"step": 4, "x" * 200_000: 1})), ""),
    "a lock of no process": (
        lambda folder: own(folder, pid=-1, started=""),
        "does not say which run",
    ),
    "a lock of an impossible process": (
        lambda folder: own(folder, pid=2**40),
        "does not say which run",
    ),
    "a lock that is a list": (lines(LOCK_FILE, "[1]"), "does not say which run"),
    "a pipe": (pipe(EVENTS_FILE), ""),
    "notes of another kind": (
        lines(STARTED_FILE, '{"settings": 3, "config": [1], "after": "b"}'),
        "",
    ),
}


def project_with_a_run(folder: Path) -> TestClient:
    good = folder / "output" / "good"
    good.mkdir(parents=True)
    tell(good, *STEPS, StateChanged("finished", 3, 9, "well done"))
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text('{"output_dir": "output/good"}')
    return TestClient(create_app(Project(folder)))


def everything(page: TestClient) -> dict[str, Any]:
    """The state of all runs by the name of their folder."""
    listing = page.get("/runs")
    assert listing.status_code == 200
    answer = page.get("/api/metrics/training/runs")
    assert answer.status_code == 200
    assert all(f'data-run="{status["run"]}"' in listing.text for status in answer.json())
    return {Path(status["config"]["output_dir"]).name: status for status in answer.json()}


@pytest.mark.parametrize("kind", KINDS)
def test_broken_run_shows_its_reason_and_hides_no_other_run(tmp_path: Path, kind: str) -> None:
    page = project_with_a_run(tmp_path)
    alone = everything(page)["good"]
    damage, reason = KINDS[kind]
    bad = tmp_path / "output" / "bad"
    bad.mkdir()
    tell(bad, *STEPS, StateChanged("finished", 3, 9))
    damage(bad)
    found = everything(page)
    assert found["good"] == alone
    head = page.get(f"/runs/{found['bad']['run']}/head")
    assert head.status_code == 200
    if reason:
        assert found["bad"]["status"] == "broken"
        assert reason in found["bad"]["message"]
        assert "broken" in head.text


@pytest.mark.slow
def test_a_broken_neighbour_is_shown_as_broken_beside_a_good_run(
    browser: Any, tmp_path: Path
) -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    folder = tmp_path.resolve()
    project_with_a_run(folder)
    (folder / "output" / "bad").mkdir()
    tell(folder / "output" / "bad", *STEPS, StateChanged("finished", 3, 9))
    with opened(browser, folder, "#run") as page:
        listed = page.locator(".run-list a", has_text="bad")
        sync_api.expect(listed).to_contain_text("finished")
        KINDS["an event without a session"][0](folder / "output" / "bad")
        page.reload()
        sync_api.expect(listed).to_contain_text("damaged")
        sync_api.expect(page.locator(".run-list a", has_text="good")).to_contain_text("finished")
        listed.click()
        sync_api.expect(page.locator(".message")).to_contain_text("has an invalid line")


def test_folder_name_that_is_not_utf8_is_shown_as_a_run(tmp_path: Path) -> None:
    page = project_with_a_run(tmp_path)
    os.rename(tmp_path / "output" / "good", os.fsencode(tmp_path / "output") + b"/good\xff")  # noqa: PTH104
    assert everything(page)["good\N{REPLACEMENT CHARACTER}"]["status"] == "completed"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("linked", Path("elsewhere.json"), "outside the project"),
        ("torn", '{"seed": ', "is not valid JSON"),
        ("list", "[1]", "must hold one JSON object"),
        ("far", '{"output_dir": "/elsewhere"}', None),
        ("long", json.dumps({"output_dir": "x" * 5000}), None),
        ("odd", '{"output_dir": [["a"]]}', None),
        ("nobody", '{"output_dir": "~nobody-of-this-name/x"}', None),
    ],
)
def test_broken_config_shows_its_reason_and_hides_no_other_config(
    tmp_path: Path, name: str, content: str | Path, reason: str | None
) -> None:
    project = tmp_path / "project"
    page = project_with_a_run(project)
    alone = everything(page)["good"]
    file = project / "config" / name / "config.json"
    file.parent.mkdir()
    if isinstance(content, Path):
        (tmp_path / content).write_text("{}")
        file.symlink_to(tmp_path / content)
    else:
        file.write_text(content)
    assert everything(page)["good"] == alone
    configs = {each["name"]: each["problem"] for each in page.get("/api/configs/").json()}
    assert configs["config"] is None
    assert (configs[name] is None) == (reason is None)
    assert (reason or "") in (configs[name] or "")


def test_main_config_linked_outside_shows_its_reason(tmp_path: Path) -> None:
    project = tmp_path / "project"
    page = project_with_a_run(project)
    (tmp_path / "elsewhere.json").write_text("{}")
    (project / "config.json").symlink_to(tmp_path / "elsewhere.json")
    assert everything(page)["good"]["status"] == "completed"
    [config] = page.get("/api/configs/").json()
    assert "outside the project" in config["problem"]
    assert page.get("/api/configs/config").status_code == 403
