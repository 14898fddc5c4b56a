"""The queue: what starts when, what is skipped, and what outlives a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from simpletuner.annexes.page.project import Project
from simpletuner.annexes.page.runs import queue as list_of_jobs
from simpletuner.annexes.page.runs import runner as module
from simpletuner.annexes.page.runs.control import Runs
from simpletuner.annexes.page.runs.queue import KEPT, QUEUE_FILE, Job, Queue
from simpletuner.annexes.page.runs.runner import SERVER_FILE, Runner
from simpletuner.errors import DiskFullError, UserError
from tests.tools.processes import PATIENCE


class Pretender(Runner):
    """Starts nothing; the test says what becomes of a job, by its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(Queue(folder), Runs(Project(folder)))
        self.ended: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.by_hand = ""
        self.started: list[str] = []

    def check(self, job: Job) -> None:
        if job.folder in self.wrong:
            raise UserError(self.wrong[job.folder])

    def spawn(self, job: Job) -> Job:
        if job.folder in self.refused:
            raise UserError(self.refused[job.folder])
        self.started.append(job.folder)
        return job

    def updated(self, job: Job) -> Job:
        return replace(job, state=self.ended.get(job.folder, job.state))

    def busy_folder(self) -> str:
        return self.by_hand


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretender:
    monkeypatch.setattr(module, "CHECK_SECONDS", -1.0)
    return Pretender(tmp_path)


@pytest.fixture
def queue(runner: Pretender) -> Queue:
    return runner.queue


def states(queue: Queue) -> dict[str, str]:
    return {job.folder: job.state for job in queue.read()}


@pytest.mark.parametrize("how", ["completed", "error", "cancelled", "interrupted"])
def test_next_job_starts_however_the_previous_one_ended(
    queue: Queue, runner: Pretender, how: str
) -> None:
    for name in "ab":
        queue.add("train", name)
    runner.step()
    runner.step()
    assert (runner.started, states(queue)) == (["a"], {"a": "running", "b": "waiting"})
    runner.ended["a"] = how
    runner.step()
    assert (runner.started, states(queue)) == (["a", "b"], {"a": how, "b": "running"})


def test_queue_waits_for_a_run_started_by_hand(queue: Queue, runner: Pretender) -> None:
    queue.add("train", "a")
    runner.by_hand = "/mine"
    runner.step()
    assert states(queue) == {"a": "waiting"}
    runner.by_hand = ""
    runner.step()
    assert states(queue) == {"a": "running"}


def test_job_with_a_problem_is_skipped_until_it_can_start(queue: Queue, runner: Pretender) -> None:
    for name in "abc":
        queue.add("train", name)
    runner.wrong["a"] = "There is no config 'a'."
    runner.refused["b"] = "in use"
    runner.step()
    a, b, c = sorted(queue.read(), key=lambda job: job.folder)
    assert (a.state, a.message, b.state, b.message) == (
        "waiting",
        "There is no config 'a'.",
        "waiting",
        "in use",
    )
    assert (runner.started, c.state) == (["c"], "running")
    runner.wrong.clear()
    runner.ended["c"] = "completed"
    runner.step()
    assert runner.started == ["c", "a"]
    assert queue.find(a.id).message == ""


def test_repeatedly_refused_job_keeps_waiting(queue: Queue, runner: Pretender) -> None:
    queue.add("train", "a")
    runner.refused["a"] = "in use on another machine"
    for _ in range(3):
        runner.step()
        assert [(job.state, job.message) for job in queue.read()] == [
            ("waiting", "in use on another machine")
        ]


def test_job_removed_during_its_check_is_not_started(queue: Queue, runner: Pretender) -> None:
    job = queue.add("train", "a")
    runner.check = lambda job: queue.remove(job.id)

    runner.step()

    assert (runner.started, queue.read()) == ([], [])
    with pytest.raises(UserError):
        queue.find(job.id)


def test_a_refused_job_keeps_its_place(queue: Queue, runner: Pretender) -> None:
    for name in "abc":
        queue.add("train", name)
    runner.wrong["a"] = "There is no config 'a'."
    runner.refused["b"] = "in use"
    runner.refused["c"] = "in use"

    runner.step()

    assert list(states(queue)) == ["a", "b", "c"]


def test_jobs_can_be_moved_and_removed(queue: Queue, runner: Pretender) -> None:
    ids = [queue.add("train", name).id for name in "abc"]
    queue.move(ids[2], -1)
    queue.move(ids[0], -5)
    assert list(states(queue)) == ["a", "c", "b"]
    queue.move(ids[0], 1)
    queue.move("absent", 1)
    queue.remove(ids[1])
    assert list(states(queue)) == ["c", "a"]
    runner.step()
    queue.remove(ids[2])
    assert states(queue) == {"c": "running", "a": "waiting"}, (
        "what is at work is stopped, not forgotten"
    )
    with pytest.raises(UserError, match="no job 'absent'"):
        queue.find("absent")


def test_requeued_job_comes_before_waiting_jobs(queue: Queue, runner: Pretender) -> None:
    cut, *_ = [queue.add("train", name, settings={"seed": 1}) for name in "abc"]
    runner.step()
    queue.requeue(cut.id)
    assert states(queue)["a"] == "running", "what is at work waits for nothing"
    runner.ended["a"] = "interrupted"  # by a reboot, say
    runner.step()
    queue.requeue(cut.id)
    assert list(states(queue).items()) == [("b", "running"), ("a", "waiting"), ("c", "waiting")]
    assert queue.find(cut.id) == cut
    queue.requeue("absent")


def test_requeued_branch_continues_instead_of_starting_again(
    queue: Queue, runner: Pretender
) -> None:
    branch = queue.add("train", "a", settings={"seed": 1, "resume_from_checkpoint": "checkpoint-8"})
    runner.step()
    runner.ended["a"] = "interrupted"
    runner.step()
    queue.requeue(branch.id)
    assert queue.find(branch.id).settings == {"seed": 1}


def test_job_is_not_started_twice_after_a_kill_during_its_start(
    queue: Queue, runner: Pretender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.add("train", "a")

    def die(job: Job) -> Job:
        runner.started.append(job.folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(runner, "spawn", die)
        with pytest.raises(KeyboardInterrupt):
            runner.step()
    Pretender(tmp_path).step()
    assert (runner.started, states(queue)) == (["a"], {"a": "running"})


def test_last_ended_jobs_are_kept(queue: Queue, runner: Pretender) -> None:
    for number in range(KEPT + 3):
        queue.add("train", str(number))
        runner.ended[str(number)] = "completed"
        runner.step()
    runner.step()
    assert list(states(queue)) == [str(number) for number in range(3, KEPT + 3)]


def test_a_full_disk_starts_nothing_and_loses_nothing(
    queue: Queue, runner: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.add("train", "a")

    def full(path: Path, content: bytes, *, private: bool) -> None:
        raise DiskFullError("no space left")

    before = queue.file.read_bytes()
    monkeypatch.setattr(list_of_jobs, "write_atomically", full)
    for act in (runner.step, lambda: queue.add("train", "b")):
        with pytest.raises(DiskFullError):
            act()
    assert (runner.started, queue.file.read_bytes()) == ([], before)


def test_damaged_queue_file_is_kept_and_reported(queue: Queue) -> None:
    queue.file.write_text('[{"id": 1}]')
    with pytest.raises(UserError, match=f"{QUEUE_FILE} is not a valid queue"):
        queue.add("train", "a")
    assert queue.file.read_text() == '[{"id": 1}]'


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_second_server_takes_over_the_queue(
    tmp_path: Path, runner: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    servers = [(Pretender(tmp_path), threading.Event()) for _ in range(2)]
    threads = [threading.Thread(target=server.serve, args=(over,)) for server, over in servers]
    threads[0].start()
    time.sleep(0.05)
    assert list(tmp_path.iterdir()) == [], "a project without a queue gets no files"
    (first, end), (second, end_too) = servers
    second.queue.add("train", "a")
    wait(lambda: states(first.queue) == {"a": "running"})
    threads[1].start()
    first.queue.file.write_text("damaged")
    wait(lambda: first.problem != "")
    assert "is not a valid queue" in first.problem
    time.sleep(10 * module.POLL_SECONDS)
    assert second.problem == ""
    first.queue.file.unlink()
    end.set()
    threads[0].join(PATIENCE)
    second.queue.add("train", "b")
    wait(lambda: states(second.queue) == {"b": "running"})
    end_too.set()
    threads[1].join(PATIENCE)
    assert (tmp_path / SERVER_FILE).is_file()


def test_queue_survives_unforeseen_errors(
    queue: Queue, runner: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    over, thread = threading.Event(), threading.Thread(target=lambda: runner.serve(over))
    queue.add("train", "a")
    with monkeypatch.context() as odd:
        odd.setattr(runner, "busy_folder", lambda: [][1])
        thread.start()
        wait(lambda: runner.problem == "list index out of range")
    wait(lambda: states(queue) == {"a": "running"})
    over.set()
    thread.join(PATIENCE)
    assert runner.problem == ""
