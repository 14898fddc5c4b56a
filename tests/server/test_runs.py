"""What a run's folder and process say about it, whatever became of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner.reporting.events import Event, EventStream, Notice, PhaseStarted, StateChanged, StepDone
from simpletuner.reporting.metrics import METRICS_FILE, MetricsFile
from simpletuner.reporting.payloads import EVENTS_FILE, EventLog, Payloads
from simpletuner.run.lock import LOCK_FILE, this_process
from simpletuner.server.runs import CONSOLE_FILE, STARTED_FILE, Run, Tail

SESSION = """
import sys
from pathlib import Path
from simpletuner.run.lock import lock_output
from tests.server.test_runs import STEPS, tell
with lock_output(Path(sys.argv[1])):
    tell(Path(sys.argv[1]), *STEPS)
    print("ready", flush=True)
    sys.stdin.readline()
"""
STEPS: tuple[Event, ...] = (
    StateChanged("starting", 0, 9),
    StateChanged("running", 0, 9),
    *(StepDone(number, 1, {"train_loss": 0.5, "learning_rate": 1e-4}, seconds=2.0) for number in (1, 2, 3)),
)


def tell(folder: Path, *events: Event) -> None:
    """What a run records of some events."""
    metrics = MetricsFile(folder / METRICS_FILE, 1)
    stream = EventStream(EventLog(folder, Payloads(every=0)))
    for event in events:
        stream.publish(event)
        if isinstance(event, StepDone):
            metrics.append(event.step, event.metrics | {"seconds": event.seconds})
    metrics.close()


def own(folder: Path, **changes: Any) -> None:
    """A lock of this process, or of one that differs from it."""
    owner = replace(this_process(), since=time.time() - 60, **changes)
    (folder / LOCK_FILE).write_text(json.dumps(asdict(owner)))


def age(folder: Path, seconds: float) -> None:
    for path in folder.iterdir():
        os.utime(path, times=(time.time() - seconds,) * 2)


def ended(how: Any) -> Callable[[Path], None]:
    return lambda folder: tell(folder, *STEPS, StateChanged(how, 3, 9, "what became of it"))


def killed(folder: Path) -> None:
    tell(folder, *STEPS)
    own(folder, started="1")


def started_again(folder: Path) -> None:
    ended("finished")(folder)
    (folder / LOCK_FILE).write_text(json.dumps(asdict(replace(this_process(), since=time.time() + 60))))


def silent_elsewhere(folder: Path) -> None:
    tell(folder, *STEPS)
    own(folder, host="elsewhere")
    age(folder, 3600)


def old_record(folder: Path) -> None:
    tell(folder, *STEPS)
    (folder / EVENTS_FILE).unlink()


def refused(folder: Path) -> None:
    """The page started it again, and the plan had problems."""
    ended("finished")(folder)
    (folder / STARTED_FILE).write_text(json.dumps({"time": time.time() + 60, "config": "config", "settings": {}}))
    said = "Step 9\n$ simpletuner train\nwarning: small\nerror: seed: is odd.\nerror: epochs: none.\n2 problems to fix"
    (folder / CONSOLE_FILE).write_text(said)


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (lambda folder: None, "idle", ""),
        (lambda folder: (tell(folder, *STEPS), own(folder)), "running", ""),
        (lambda folder: (tell(folder, STEPS[0], PhaseStarted("Encoding")), own(folder)), "starting", ""),
        (started_again, "starting", ""),
        (ended("finished"), "completed", "what became of it"),
        (ended("failed"), "error", "what became of it"),
        (ended("interrupted"), "cancelled", "what became of it"),
        (killed, "interrupted", "Ended unexpectedly at step 3."),
        (lambda folder: (tell(folder, *STEPS), own(folder, boot="an earlier one")), "interrupted", "at step 3."),
        (lambda folder: (tell(folder, *STEPS), own(folder, pid=2**30, started="")), "interrupted", "at step 3."),
        (lambda folder: (tell(folder, *STEPS), own(folder, host="elsewhere")), "running", "On elsewhere."),
        (silent_elsewhere, "interrupted", "No sign of life for 1:0"),
        (old_record, "cancelled", "Stopped at step 3."),
        (refused, "error", "seed: is odd.\nepochs: none."),
    ],
)
def test_the_folder_says_what_became_of_a_run(
    tmp_path: Path, make: Callable[[Path], object], state: str, message: str
) -> None:
    make(tmp_path)
    status = Run("run", tmp_path, written_by="config").status()
    assert status["status"] == state
    assert message in status["message"]
    is_active = state in ("starting", "running")
    assert status["can"]["stop"] == is_active
    assert status["can"]["start"] == (state == "idle")
    assert status["can"]["continue"] == (not is_active and state != "idle")
    assert status["can"]["save"] == (state == "running")
    assert status["can"]["cancel"] == (is_active and "elsewhere" not in message)


def test_a_killed_process_leaves_no_state_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SESSION, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    run = Run("run", tmp_path, written_by="config")
    status = run.status()
    assert (status["status"], run.pid) == ("running", process.pid)
    assert (status["progress"]["current"], status["progress"]["total"]) == (3, 9)
    assert status["progress"]["eta_seconds"] == pytest.approx(12)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has collected it
    status = run.status()
    assert (status["status"], status["message"]) == ("interrupted", "Ended unexpectedly at step 3.")
    assert status["progress"]["eta_seconds"] is None
    assert status["can"]["continue"]
    assert not status["can"]["cancel"]
    process.communicate()


def test_a_new_session_begins_a_new_story(tmp_path: Path) -> None:
    run = Run("run", tmp_path)
    tell(tmp_path, Notice("hot", warning=True), *STEPS, PhaseStarted("Rendering", stage="validation"))
    first = run.status()
    assert first["stages"]["validation"]["status"] == "failed", "nothing goes on in a run that has ended"
    assert [each["message"] for each in run.read()[0].notices] == ["hot"]
    tell(tmp_path, *STEPS)
    second = run.status()
    assert second["job_id"] != first["job_id"]
    assert (second["stages"], run.read()[0].notices) == ({}, [])


def test_each_line_is_read_once_and_torn_ones_later(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    tail = Tail(path, "id")
    assert tail.read() == []
    path.write_text('{"id": 1}\nnot json\n[1]\n{"no": 1}\n{"id"')
    assert tail.read() == [{"id": 1}]
    with path.open("a") as file:
        file.write(': 2}\n{"id": 3}\n')
    assert tail.read() == [{"id": 2}, {"id": 3}]
    assert tail.read() == []
    path.write_text('{"id": 1}\n')  # cut
    assert tail.read() == [{"id": 1}]
    (tmp_path / "new").write_text('{"id": 1}\n{"id": 2}\n')
    (tmp_path / "new").replace(path)
    assert tail.read() == [{"id": 1}, {"id": 2}]
    assert tail.generation == 3


def test_a_run_that_goes_back_to_a_checkpoint_loses_its_later_steps_here_too(tmp_path: Path) -> None:
    run = Run("run", tmp_path)
    tell(tmp_path, *STEPS)
    assert [row["step"] for row in run.read()[1]] == [1, 2, 3]
    resumed = MetricsFile(tmp_path / METRICS_FILE, 2)
    resumed.append(3, {"train_loss": 0.25})
    resumed.close()
    assert [(row["step"], row["train_loss"]) for row in run.read()[1]] == [(1, 0.5), (2, 0.5), (3, 0.25)]
