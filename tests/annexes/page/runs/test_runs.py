"""What a run's folder and process say about it, whatever became of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from simpletuner.annexes.page.project import Refusal
from simpletuner.annexes.page.runs.control import ask, cancel, refuse_if_busy
from simpletuner.annexes.page.runs.live import drawn
from simpletuner.annexes.payloads import EVENTS_FILE, EventLog, Payloads, last_id
from simpletuner.annexes.runs.console import CONSOLE_FILE
from simpletuner.annexes.runs.log_files import Tail
from simpletuner.annexes.runs.run import Run
from simpletuner.distributed.requests import take_requests
from simpletuner.planning.lock import LOCK_FILE, STARTED_FILE, lock_output, this_process
from simpletuner.reporting.events import (
    UPLOADING,
    CheckpointSaved,
    Event,
    EventStream,
    Notice,
    PhaseStarted,
    StateChanged,
    StepReport,
    Uploaded,
)
from simpletuner.reporting.metrics import METRICS_FILE, MetricsFile
from tests.tools.processes import PATIENCE

SESSION = """
import sys
from pathlib import Path
from simpletuner.planning.lock import lock_output
from tests.annexes.page.runs.test_runs import STEPS, tell
with lock_output(Path(sys.argv[1])):
    tell(Path(sys.argv[1]), *STEPS)
    print("ready", flush=True)
    sys.stdin.readline()
"""
STARTS_OVER = "Without a checkpoint, it starts over."
STEPS: tuple[Event, ...] = (
    StateChanged("starting", 0, 9),
    StateChanged("running", 0, 9),
    *(
        StepReport(number, 1, {"train_loss": 0.5, "learning_rate": 1e-4}, seconds=2.0)
        for number in (1, 2, 3)
    ),
)


def tell(folder: Path, *events: Event) -> None:
    """What a run records of some events."""
    metrics = MetricsFile(folder / METRICS_FILE, 1)
    stream = EventStream(EventLog(folder, Payloads(every=0)))
    for event in events:
        stream.publish(event)
        if isinstance(event, StepReport):
            metrics.append(event.step, event.metrics | {"seconds": event.seconds})
    metrics.close()


def own(folder: Path, **changes: Any) -> None:
    """A lock of this process, or of one that differs from it."""
    owner = replace(this_process(), **{"since": time.time() - 60, **changes})
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
    own(folder, after=last_id(folder / EVENTS_FILE))


def start_from_the_page(folder: Path) -> None:
    started = {
        "config": "config",
        "settings": {},
        "after": last_id(folder / EVENTS_FILE),
        "time": time.time(),
    }
    (folder / STARTED_FILE).write_text(json.dumps(started))


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
    start_from_the_page(folder)
    said = (
        "Step 9\n$ simpletuner train\nwarning: small\nerror: seed: is odd.\nerror: epochs: "
        "none.\n2 problems to fix"
    )
    (folder / CONSOLE_FILE).write_text(said)


def stopped_at_once(folder: Path) -> None:
    """The page started it, and Stop came before the program had set up anything."""
    killed(folder)
    (folder / LOCK_FILE).unlink()
    start_from_the_page(folder)
    (folder / CONSOLE_FILE).write_text(
        "$ simpletuner train\nTraceback (most recent call last):\nKeyboardInterrupt\n"
    )


def without_room_for_its_last_event(folder: Path) -> None:
    """The page started it, and a full disk ended it, of which it could tell on the console
    alone.
    """
    start_from_the_page(folder)
    tell(folder, *STEPS)
    (folder / CONSOLE_FILE).write_text(
        "$ simpletuner train\nTraining\nerror: no space left on the disk.\n"
    )


def killed_after_speaking(folder: Path) -> None:
    """As before, but its last words are no reason."""
    without_room_for_its_last_event(folder)
    (folder / CONSOLE_FILE).write_text("$ simpletuner train\nTraining\n")


def told_by_a_clock_set_back(folder: Path) -> None:
    """The page started it, and the clock was set back a year before it ended."""
    start_from_the_page(folder)
    ended("finished")(folder)
    log = folder / EVENTS_FILE
    log.write_text(re.sub(r'"timestamp": "\d+', '"timestamp": "2020', log.read_text()))
    (folder / CONSOLE_FILE).write_text("$ simpletuner train\nTrained 3 steps.\n")


def uploaded(folder: Path) -> None:
    """Uploads are told as a status that has no progress."""
    tell(
        folder,
        *STEPS,
        PhaseStarted("Uploading", kind=UPLOADING),
        Uploaded("the LoRA", "https://example.org", 3),
    )
    own(folder)


@pytest.mark.parametrize(
    ("make", "state", "message"),
    [
        (lambda folder: None, "idle", ""),
        (lambda folder: (tell(folder, *STEPS), own(folder)), "running", ""),
        (
            lambda folder: (tell(folder, STEPS[0], PhaseStarted("Encoding")), own(folder)),
            "starting",
            "",
        ),
        (started_again, "starting", ""),
        (ended("finished"), "completed", "what became of it"),
        (ended("failed"), "error", "what became of it"),
        (ended("interrupted"), "cancelled", "what became of it"),
        (killed, "interrupted", "Ended unexpectedly at step 3."),
        (
            lambda folder: (tell(folder, *STEPS), own(folder, boot="an earlier one")),
            "interrupted",
            "at step 3.",
        ),
        (
            lambda folder: (tell(folder, *STEPS), own(folder, pid=2**30, started="")),
            "interrupted",
            "at step 3.",
        ),
        (
            lambda folder: (tell(folder, *STEPS), own(folder, host="elsewhere")),
            "running",
            "On elsewhere.",
        ),
        (silent_elsewhere, "interrupted", "No heartbeat for 1:0"),
        (old_record, "cancelled", "Stopped at step 3; nothing was saved."),
        (refused, "error", "seed: is odd.\nepochs: none."),
        (stopped_at_once, "cancelled", "Cancelled at step 3; nothing was saved."),
        (without_room_for_its_last_event, "error", "no space left on the disk."),
        (killed_after_speaking, "interrupted", "Ended unexpectedly at step 3."),
        (told_by_a_clock_set_back, "completed", "what became of it"),
        (uploaded, "running", ""),
    ],
)
def test_state_of_a_run_is_read_from_its_folder(
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


def test_run_that_ends_during_the_check_is_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell(tmp_path, *STEPS)
    own(tmp_path)
    run = Run("run", tmp_path)
    read = Run.read

    def read_and_end(self: Run) -> Any:
        found = read(self)
        ended("finished")(tmp_path)
        (tmp_path / LOCK_FILE).unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Run, "read", read_and_end)
    assert run.judge().status == "running"
    assert run.judge().status == "completed"
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # as it was a moment before
    assert run.owner is None


def test_history_read_by_a_thread_does_not_change(tmp_path: Path) -> None:
    tell(tmp_path, *STEPS, PhaseStarted("Encoding"))
    run = Run("run", tmp_path)
    before = run.read()
    stages = list(before.stages)
    tell(tmp_path, PhaseStarted("Loading"))
    assert len(run.read().stages) == 1
    assert list(before.stages) == stages


def test_a_killed_process_leaves_no_state_behind(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SESSION, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    run = Run("run", tmp_path, written_by="config")
    status = run.status()
    assert (status["status"], run.pid) == ("running", process.pid)
    assert (status["progress"]["current"], status["progress"]["total"]) == (3, 9)
    assert status["progress"]["eta_seconds"] == pytest.approx(12)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    status = run.status()
    assert status["sentence"].startswith("Paused: its process was stopped from outside.")
    assert (status["label"], status["can"]["resume"]) == ("paused", True)
    assert (status["status"], status["progress"]["eta_seconds"]) == ("running", None)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has collected it
    status = run.status()
    assert (status["status"], status["message"]) == (
        "interrupted",
        f"Ended unexpectedly at step 3. {STARTS_OVER}",
    )
    assert status["progress"]["eta_seconds"] is None
    assert status["can"]["continue"]
    assert not status["can"]["cancel"]
    process.communicate()


def test_silent_run_has_no_remaining_time(tmp_path: Path) -> None:
    run = Run("run", tmp_path)
    tell(tmp_path, *STEPS)
    own(tmp_path)
    assert run.status()["progress"]["eta_seconds"] is not None
    age(tmp_path, 90)
    assert "No events for 1:0" in run.status()["message"], "no longer than it holds the folder"
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(replace(this_process(), since=0.0))))
    status = run.status()
    assert "No events for 1:3" in status["message"]
    assert (status["status"], status["progress"]["eta_seconds"]) == ("running", None)


def test_all_numbers_of_a_killed_run_are_those_of_its_last_step(tmp_path: Path) -> None:
    killed(tmp_path)
    with (tmp_path / METRICS_FILE).open("a") as record:
        record.write(
            '{"step": 4, "train_loss": 0.25}\n'
        )  # a second had not passed since the last event about steps
    status = Run("run", tmp_path).status()
    assert status["message"] == f"Ended unexpectedly at step 4. {STARTS_OVER}"
    assert (status["progress"]["current"], status["progress"]["percent"]) == (4, 44.4)
    assert status["progress"]["metrics"]["train_loss"] == 0.25


def test_session_without_events_is_starting_and_can_be_stopped(
    tmp_path: Path,
) -> None:
    tell(tmp_path, *STEPS, PhaseStarted("Rendering", stage="validation"))  # and then it was killed
    start_from_the_page(tmp_path)
    script = (
        "import signal; signal.signal(signal.SIGINT, lambda *_: exit(5)); print(); signal.pause()"
    )
    run = Run("run", tmp_path, written_by="config")
    run.child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert run.child.stdout is not None
    run.child.stdout.readline()
    status = run.status()
    assert (status["status"], status["can"]["stop"], status["stages"]) == ("starting", True, {})
    ask(run, "stop")
    assert run.child.wait(PATIENCE) == 5, "it looks at no files yet"
    run.child.stdout.close()
    # A run in a terminal says in its lock which events are older.
    run = Run("run", tmp_path, written_by="config")
    with lock_output(tmp_path):
        assert run.status()["status"] == "starting"
        tell(tmp_path, *STEPS)
        assert run.status()["status"] == "running"


IN_A_LONG_STEP = """
import sys, time
from pathlib import Path
from simpletuner.distributed.requests import Stop, signals_as_interrupt, stop_on_interrupt
from simpletuner.reporting.events import StateChanged
from tests.annexes.page.runs.test_runs import STEPS, tell
folder = Path(sys.argv[1])
announce = lambda: tell(folder, *STEPS, StateChanged("stopping", 3, 9))
with signals_as_interrupt(), stop_on_interrupt(Stop(), announce):
    print("ready", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        sys.exit(7)
"""


def test_cancel_interrupts_the_step_that_a_stop_would_finish(tmp_path: Path) -> None:
    tell(tmp_path, *STEPS)
    start_from_the_page(tmp_path)
    run = Run("run", tmp_path, written_by="config")
    command = [sys.executable, "-c", IN_A_LONG_STEP, str(tmp_path)]
    run.child = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert run.child.stdout is not None
    run.child.stdout.readline()

    cancel(run)

    assert run.child.wait(PATIENCE) == 7
    run.child.stdout.close()


def lengthen(folder: Path, count: int) -> None:
    """Give a run `count` events, and one step less; the last event stays the last."""
    log = folder / EVENTS_FILE
    metrics = folder / METRICS_FILE
    events = [line.partition(",")[2] for line in log.read_text().splitlines()]
    between = (f'{{"id": {number},{events[-2]}\n' for number in range(len(events), count))
    head = [f'{{"id": {number},{event}\n' for number, event in enumerate(events[:-1], 1)]
    with log.open("w") as file:
        file.writelines([*head, *between, f'{{"id": {count},{events[-1]}\n'])
    row = metrics.read_text().splitlines()[-1].partition(",")[2]
    with metrics.open("a") as file:
        file.writelines(f'{{"step": {number},{row}\n' for number in range(4, count))


def test_long_runs_are_read_a_part_at_a_time(tmp_path: Path) -> None:
    count = 10_000
    tell(tmp_path, *STEPS, StateChanged("stopping", 3, 9, "as asked"))
    lengthen(tmp_path, count)
    run = Run("run", tmp_path)
    tracemalloc.start()
    status = run.status()
    held, most = tracemalloc.get_traced_memory()
    columns = run.metrics
    columns_held = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    assert status["message"] == f"Ended unexpectedly at step 9,999. {STARTS_OVER}"
    assert run.read().status == "stopping"
    assert [event["id"] for event in run.recent[-2:]] == [count - 1, count]
    assert most < (tmp_path / EVENTS_FILE).stat().st_size / 4
    assert held < 200_000
    assert len(columns.points("train_loss")) == count - 1
    assert columns_held < (len(columns.names) + 1) * 16 * count * 1.5


def test_a_new_session_begins_a_new_history(tmp_path: Path) -> None:
    run = Run("run", tmp_path)
    tell(
        tmp_path, Notice("hot", warning=True), *STEPS, PhaseStarted("Rendering", stage="validation")
    )
    first = run.status()
    assert first["stages"]["validation"]["status"] == "failed", (
        "nothing goes on in a run that has ended"
    )
    assert run.read().notices == ["hot"]
    tell(tmp_path, *STEPS)
    second = run.status()
    assert second["job_id"] != first["job_id"]
    assert (second["stages"], run.read().notices) == ({}, [])


def test_each_line_is_read_once_and_an_incomplete_one_later(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    renewed: list[None] = []
    tail = Tail(path, "id", renew=lambda: renewed.append(None))

    def read() -> list[dict[str, Any]]:
        return list(tail.rows())

    assert read() == []
    path.write_text('{"id": 1}\nnot json\n[1]\n{"no": 1}\n{"id"')
    assert read() == [{"id": 1}]
    assert tail.damage == "lines has an invalid line: not json"
    with path.open("a") as file:
        file.write(': 2}\n{"id": 3}\n')
    assert read() == [{"id": 2}, {"id": 3}]
    assert read() == []
    path.write_text('{"id": 1}\n')  # cut
    assert (read(), tail.damage) == ([{"id": 1}], "")
    (tmp_path / "new").write_text('{"id": 1}\n{"id": 2}\n')
    (tmp_path / "new").replace(path)
    assert read() == [{"id": 1}, {"id": 2}]
    path.unlink()
    assert read() == []
    assert len(renewed) == 4


def test_run_resumed_from_a_checkpoint_drops_later_steps(
    tmp_path: Path,
) -> None:
    run = Run("run", tmp_path)
    tell(tmp_path, *STEPS)
    assert list(run.metrics.steps) == [1, 2, 3]
    resumed = MetricsFile(tmp_path / METRICS_FILE, 2)
    resumed.append(3, {"train_loss": 0.25})
    resumed.close()
    assert run.metrics.points("train_loss") == [(1, 0.5), (2, 0.5), (3, 0.25)]


def test_a_silent_lock_of_another_machine_is_left_to_the_run_that_watches_it(
    tmp_path: Path,
) -> None:
    """As on the command line; one that changed a moment ago is in use."""
    run = Run("", tmp_path)
    silent_elsewhere(tmp_path)
    refuse_if_busy(run)
    own(tmp_path, host="elsewhere")
    with pytest.raises(Refusal, match="is already running"):
        refuse_if_busy(run)
    age(tmp_path, 3600)
    refuse_if_busy(run)


def test_file_deleted_while_being_read_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new run deletes the events of the one before; the streams to browsers go on."""
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    assert Tail(tmp_path / "absent.jsonl", "id").lines() == []


def test_request_is_pending_until_it_is_processed(tmp_path: Path) -> None:
    run = Run("", tmp_path)
    own(tmp_path)
    tell(tmp_path, *STEPS)
    assert run.status()["asked"] == []
    ask(run, "save")
    assert run.status()["asked"] == ["save"]
    assert "Save now: asked" in drawn(run, "head")
    take_requests(tmp_path)
    tell(
        tmp_path,
        *STEPS,
        CheckpointSaved(tmp_path / "checkpoint-3", 3, 1.0),
        Notice("The run will stop at the end of epoch 2."),
    )
    assert run.status()["asked"] == []
    answered = drawn(run, "head")
    assert "Saved checkpoint-3" in answered
    assert ": asked" not in answered
    assert "The run will stop at the end of epoch 2." in answered
