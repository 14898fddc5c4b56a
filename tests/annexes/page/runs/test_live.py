"""The routes of runs: state and buttons, events as they come, curves and previews."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs.control import Runs
from simpletuner.annexes.page.runs.live import event_stream
from simpletuner.annexes.page.serve import create_app
from simpletuner.annexes.payloads import EVENTS_FILE, EventLog, Payloads
from simpletuner.annexes.runs.console import CONSOLE_FILE
from simpletuner.annexes.runs.run import BUTTONS
from simpletuner.config.absent import removed_keys
from simpletuner.planning.lock import LOCK_FILE
from simpletuner.reporting.events import EventStream, Notice, StateChanged, StepReport
from simpletuner.reporting.metrics import METRICS_FILE, MetricsFile
from simpletuner.weights.lora_names import LORA_FILE
from tests.annexes.page.page import ending_runs, serving
from tests.annexes.page.runs.test_runs import STEPS, lengthen, own, tell
from tests.annexes.page.test_serve import fetch, started
from tests.tools.processes import PATIENCE
from tests.tools.workspace import Workspace


@pytest.fixture
def project(
    tmp_path: Path, t2i_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Workspace]:
    made = Workspace.create((tmp_path / "project").resolve(), t2i_checkpoint)
    monkeypatch.chdir(made.folder)
    with ending_runs(made.folder):
        yield made


@pytest.fixture
def page(project: Workspace) -> TestClient:
    return TestClient(create_app(Project(project.folder)))


def until(
    page: TestClient, wanted: Callable[[dict[str, Any]], bool], run: str = ""
) -> dict[str, Any]:
    """The state of a run, of the first if none is named, as soon as it is as wanted."""
    deadline = time.monotonic() + PATIENCE
    while not wanted(status := page.get(f"/api/training/status?run={run}").json()):
        assert status["status"] != "error", status
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return dict(status)


def post(page: TestClient, path: str, code: int = 202, **body: Any) -> Any:
    answer = page.post(f"/api/training/{path}", json=body)
    assert answer.status_code == code, answer.text
    return answer.json()


def test_project_without_runs_is_idle_and_can_start_one(
    page: TestClient, project: Workspace
) -> None:
    status = page.get("/api/training/status").json()
    assert (status["status"], status["config"]["name"]) == ("idle", "config")
    assert status["can"]["start"]
    assert post(page, "stop", 400)["problems"][0]["message"] == "No active training job."
    assert page.get("/api/training/status?run=nobody").status_code == 404
    shutil.rmtree(project.folder / "config")
    assert page.get("/api/training/status").json()["status"] == "idle"


def test_settings_are_checked_before_anything_starts(page: TestClient, project: Workspace) -> None:
    [problem] = post(page, "start", 422, settings={"max_train_stepz": 3})["problems"]
    assert problem["key"] == "max_train_stepz"
    assert problem["message"] == "is not a known key. Did you mean 'max_train_steps'?"
    post(page, "start", 404, config="another")
    post(page, "start", 400, settings=[])
    assert post(page, "start", 422, settings={"output_dir": "/tmp"})["problems"]
    assert not project.path("output").exists()


@pytest.mark.usefixtures("quick_commands")
def test_run_refused_by_the_plan_shows_the_reason(page: TestClient, project: Workspace) -> None:
    shutil.rmtree(project.path("datasets"))
    run = post(page, "start", config="config")["run"]
    status = until(page, lambda status: status["status"] == "error")
    assert (status["run"], status["config"]["name"]) == (run, "config")
    assert "datasets/pictures" in status["message"]
    assert "$ simpletuner train --config=" in project.path(f"output/{CONSOLE_FILE}").read_text()
    assert status["message"].splitlines()[0] in page.get(f"/runs/{run}/head").text.replace(
        "&#39;", "'"
    )
    # A run that has begun continues where it is, wherever its config writes to by now.
    MetricsFile(project.path("output") / METRICS_FILE, 1).append(1, {"train_loss": 0.5})
    project.write_config(output_dir="elsewhere")
    assert post(page, "start", run=run)["run"] == run
    assert (
        f"--output_dir={project.path('output')}"
        in project.path(f"output/{CONSOLE_FILE}").read_text()
    )
    shown = {
        status["run"]: status["config"]["name"]
        for status in page.get("/api/metrics/training/runs").json()
    }
    assert shown[run] == "config"
    assert [
        text for text in re.findall(r'data-config="(\w*)"', page.get("/runs").text) if text
    ] == ["config"]
    assert until(page, lambda status: status["status"] == "error", run)["run"] == run


def test_start_is_refused_while_the_folder_is_in_use(page: TestClient, project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    own(output)
    [problem] = post(page, "start", 409)["problems"]
    assert f"is in use by process {os.getpid()}" in problem["message"]
    assert sorted(path.name for path in output.iterdir()) == [LOCK_FILE]


def test_buttons_write_request_files(page: TestClient, project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS)
    own(output)
    for path in ("stop_at_epoch_end", "checkpoint/run", "validation/run", "stop"):
        post(page, path)
    status = page.get("/api/training/status").json()
    assert (status["message"], status["can"]["stop"]) == (
        "Stops after this step and its previews.",
        False,
    )
    asked = sorted(path.name for path in (output / "requests").iterdir())
    assert asked == ["preview", "save", "stop", "stop_at_epoch_end"]
    # Another browser may show an older state, and press them again.
    for path in ("checkpoint/run", "stop"):
        post(page, path)
    tell(output, StateChanged("stopping", 3, 9))
    post(page, "stop")
    [problem] = post(page, "stop_at_epoch_end", 400)["problems"]
    assert problem["message"].endswith("It can do this only between two steps.")


def test_after_the_last_step_only_a_stop_is_accepted(page: TestClient, project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    tell(output, StateChanged("running", 0, 1), StepReport(1, 1, {"train_loss": 0.5}, seconds=2.0))
    own(output)

    for path in ("stop_at_epoch_end", "checkpoint/run", "validation/run"):
        post(page, path, 400)

    assert page.get("/api/training/status").json()["can"]["stop"]
    assert not (output / "requests").exists()


def test_a_new_run_starts_from_the_lora_of_another(page: TestClient, project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS, StateChanged("finished", 3, 3))
    run = page.get("/api/training/status").json()["run"]
    post(page, "new", 400, run=run, name="second")
    (output / LORA_FILE).touch()
    for name, code in (("../second", 422), ("config", 422), ("second", 201), ("second", 409)):
        post(page, "new", code, run=run, name=name)
    written = json.loads(project.path("config/second/config.json").read_text())
    assert (written["init_lora"], written["output_dir"]) == (
        str(output / LORA_FILE),
        "output/second",
    )
    assert Path(written["data_backend_config"]).exists()
    assert {
        status["config"]["name"] for status in page.get("/api/metrics/training/runs").json()
    } == {
        "config",
        "second",
    }


def test_a_new_run_says_which_settings_it_leaves_out(page: TestClient, project: Workspace) -> None:
    removed = next(key for key, row in removed_keys("config").items() if not row.part_of)
    project.write_config(**{removed: 0.25})
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS, StateChanged("finished", 3, 3))
    (output / LORA_FILE).touch()
    run = page.get("/api/training/status").json()["run"]

    answer = post(page, "new", 201, run=run, name="second")

    assert answer["config"] == "second"
    assert len(answer["left_out"]) == 1
    assert f"{removed} was removed" in answer["left_out"][0]
    assert removed not in json.loads(project.path("config/second/config.json").read_text())


def test_a_run_continues_its_branch_instead_of_starting_it_again(project: Workspace) -> None:
    project.write_config(resume_from_checkpoint="checkpoint-2")
    project.path("output").mkdir()
    tell(project.path("output"), *STEPS, StateChanged("finished", 3, 3))
    runs = Runs(Project(project.folder))
    (run,) = runs.all()
    assert runs.settings_of(run, {})["resume_from_checkpoint"] == "latest"
    chosen = {"resume_from_checkpoint": "checkpoint-1"}
    assert runs.settings_of(run, chosen) == chosen, "what is asked for now counts"


def test_the_page_of_a_run_shows_it_and_starts_nothing(project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    tell(output, *STEPS, StateChanged("failed", 3, 3, "broken"))
    page = TestClient(create_app(Project(project.folder, run=output)))
    assert page.get("/api/training/status").json()["can"] == dict.fromkeys(BUTTONS, False)
    post(page, "start", 403)


def test_curves_keep_their_extremes(page: TestClient, project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    rows = [
        {"step": step, "train_loss": 9.0 if step == 777 else 1.0, "seconds": 3.6}
        for step in range(1, 2001)
    ]
    (output / "training_metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = page.get("/api/training/status").json()["run"]
    answer = page.get(f"/api/metrics/training/runs/{run}?max_points=100&metric=train_loss").json()
    assert list(answer["metrics"]) == ["train_loss"]
    points = answer["metrics"]["train_loss"]
    assert len(points) <= 100
    assert [777, 9.0] in points
    assert answer["hours"][-1] == [2000, pytest.approx(2.0)]
    assert set(page.get(f"/api/metrics/training/runs/{run}").json()["metrics"]) == {
        "train_loss",
        "seconds",
    }
    assert '"title":"Loss"' in page.get(f"/runs/{run}/curves").text


def test_previews_are_served_in_ranges_and_nothing_else_is(
    page: TestClient, project: Workspace
) -> None:
    output = project.path("output")
    (output / "validation_images").mkdir(parents=True)
    tell(output, *STEPS)
    (output / "validation_images" / "clip.mp4").write_bytes(bytes(range(100)))
    (output / "validation_images" / "link.png").symlink_to(project.path("datasets/pictures/p0.png"))
    (output / "training_report.html").write_text("<script>1</script>")
    (output / "weights.safetensors").touch()
    run = page.get("/api/training/status").json()["run"]
    part = page.get(f"/media/{run}/validation_images/clip.mp4", headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, bytes(range(10, 20)))
    for path in (
        "validation_images/link.png",
        "weights.safetensors",
        EVENTS_FILE,
        "../config/config.json",
        "..%2f..%2fconfig%2fconfig.json",
        "%2e%2e/config/config.json",
        "validation_images",
        "absent.png",
    ):
        assert page.get(f"/media/{run}/{path}").status_code == 404, path
    for path in ("%00", "bird%00.png", "x" * 300 + ".png"):
        assert page.get(f"/media/{run}/{path}").status_code == 400, path
    report = page.get(f"/report/{run}")
    assert report.text == "<script>1</script>"
    assert "sandbox allow-scripts" in report.headers["content-security-policy"], (
        "it must not act for the page"
    )


class Listener:
    """A browser that listens to the events of a run."""

    def __init__(self, port: int, run: str, last: str = "") -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        self.connection.request(
            "GET",
            f"/api/training/events?run={run}",
            headers={"Last-Event-ID": last} if last else {},
        )
        self.answer = self.connection.getresponse()
        assert self.answer.getheader("content-type", "").startswith("text/event-stream")
        assert self.answer.readline() == b": connected\n"

    def hear(self, count: int) -> list[tuple[int, str]]:
        """The ids of the next events, and their messages."""
        found: list[tuple[int, str]] = []
        number = 0
        while len(found) < count:
            line = self.answer.readline()
            assert line, "the server ended the stream"
            key, _, value = line.decode().strip().partition(": ")
            number = int(value) if key == "id" else number
            if key == "data":
                found.append((number, json.loads(value).get("message", "")))
        return found

    def close(self) -> None:
        self.answer.close()
        self.connection.close()


@pytest.mark.slow
def test_events_reach_every_browser_and_none_is_missed(project: Workspace) -> None:
    output = project.path("output")
    output.mkdir()
    stream = EventStream(EventLog(output, Payloads(every=0)))
    stream.notify("before")
    run = TestClient(create_app(Project(project.folder))).get("/api/training/status").json()["run"]
    with serving(project.folder) as (port, server):
        first = Listener(port, run)
        late = Listener(port, run, last="0")
        stream.notify("one")
        assert first.hear(1) == [(2, "one")]
        assert late.hear(2) == [(1, "before"), (2, "one")]
        first.close()
        stream.notify("two")
        stream.publish(Notice("three", warning=True))
        ahead = Listener(port, run, last="99")  # its run was deleted, and this is another
        assert ahead.hear(1) == [(1, "before")]
        again = Listener(port, run, last="2")
        assert again.hear(2) == [(3, "two"), (4, "three")]
        assert late.hear(2) == [(3, "two"), (4, "three")]
        (output / EVENTS_FILE).unlink()  # a new run in the same folder
        EventStream(EventLog(output, Payloads(every=0))).notify("anew")
        assert late.hear(1) == [(1, "anew")]
        for listener in (late, ahead, again):
            listener.close()
        deadline = time.monotonic() + PATIENCE
        while server.server_state.tasks:  # no stream outlives its browser
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_events_for_a_slow_client_are_not_held_in_memory(tmp_path: Path) -> None:
    tell(tmp_path, *STEPS)
    lengthen(tmp_path, 10_000)
    log = tmp_path / EVENTS_FILE

    async def ids(after: int, count: int) -> list[int]:
        stream = event_stream(log, after, threading.Event(), dict)
        try:
            said = [await anext(stream) for _ in range(count + 1)]
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        return [int(text.partition("\n")[0].removeprefix("id: ")) for text in said[1:]]

    tracemalloc.start()
    assert asyncio.run(ids(0, 2)) == [1, 2]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < log.stat().st_size / 5
    assert asyncio.run(ids(9_998, 2)) == [9_999, 10_000]


@pytest.mark.slow(15)
@pytest.mark.usefixtures("quick_commands")
def test_a_run_outlives_its_server_is_stopped_and_continued(
    page: TestClient, project: Workspace
) -> None:
    """The server and its run are started as a user starts them; the run is continued quickly."""
    project.write_config(max_train_steps=50_000, checkpoint_step_interval=1000)
    project.path("config/first").mkdir()
    project.path("config/config.json").rename(project.path("config/first/config.json"))
    with started(project.folder, "--env", "first") as (process, address):
        assert b'"ok"' in fetch(address[3])
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does
        assert process.communicate(timeout=PATIENCE)[1] == "Interrupted.\n"
    # Another server, which knows nothing.
    status = until(page, lambda status: status["progress"]["current"] >= 2)
    run = status["run"]
    assert (status["status"], status["config"]["name"], status["progress"]["total"]) == (
        "running",
        "first",
        50_000,
    )
    post(page, "start", 409, config="first")
    post(page, "stop")
    status = until(page, lambda status: status["can"]["continue"])
    step = status["progress"]["current"]
    assert (status["status"], status["message"].partition(";")[0]) == (
        "cancelled",
        f"Stopped at step {step}",
    )
    assert post(page, "start", run=run, settings={"max_train_steps": step + 2})["run"] == run
    status = until(page, lambda status: status["status"] == "completed")
    assert status["progress"]["current"] == step + 2
    assert [row["step"] for row in project.metrics()] == list(range(1, step + 3))
    assert "Trained 2 steps" in project.path(f"output/{CONSOLE_FILE}").read_text()
