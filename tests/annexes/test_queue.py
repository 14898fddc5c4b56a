"""The queue: what starts when, what is skipped, and what outlives a server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from simpletuner.annexes import queue as module
from simpletuner.annexes.queue import QUEUE_FILE, SERVER_FILE, Job, Queue
from simpletuner.errors import DiskFullError, UserError
from tests.processes import PATIENCE


@dataclass
class Pretender:
    """Starts nothing; the test says what becomes of a job, by its folder."""

    ended: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    by_hand: str = ""
    started: list[str] = field(default_factory=list)

    def check(self, job: Job) -> None:
        if job.folder in self.wrong:
            raise UserError(self.wrong[job.folder])

    def start(self, job: Job) -> Job:
        if job.folder in self.refused:
            raise UserError(self.refused[job.folder])
        self.started.append(job.folder)
        return job

    def look(self, job: Job) -> Job:
        return replace(job, state=self.ended.get(job.folder, job.state))

    def at_work(self) -> str:
        return self.by_hand


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Pretender:
    monkeypatch.setattr(module, "CHECK_SECONDS", -1.0)
    return Pretender()


@pytest.fixture
def queue(tmp_path: Path, worker: Pretender) -> Queue:
    return Queue(tmp_path, worker)


def states(queue: Queue) -> dict[str, str]:
    return {job.folder: job.state for job in queue.read()}


@pytest.mark.parametrize("how", ["completed", "error", "cancelled", "interrupted"])
def test_the_next_starts_however_the_one_before_ended(queue: Queue, worker: Pretender, how: str) -> None:
    for name in "ab":
        queue.add("train", name)
    queue.step()
    queue.step()
    assert (worker.started, states(queue)) == (["a"], {"a": "running", "b": "waiting"})
    worker.ended["a"] = how
    queue.step()
    assert (worker.started, states(queue)) == (["a", "b"], {"a": how, "b": "running"})


def test_a_run_that_was_started_by_hand_is_waited_for(queue: Queue, worker: Pretender) -> None:
    queue.add("train", "a")
    worker.by_hand = "/mine"
    queue.step()
    assert states(queue) == {"a": "waiting"}
    worker.by_hand = ""
    queue.step()
    assert states(queue) == {"a": "running"}


def test_what_cannot_start_is_skipped_with_its_problem_and_starts_once_it_can(queue: Queue, worker: Pretender) -> None:
    for name in "abc":
        queue.add("train", name)
    worker.wrong["a"], worker.refused["b"] = "There is no config 'a'.", "in use"
    queue.step()
    a, b, c = sorted(queue.read(), key=lambda job: job.folder)
    assert (a.state, a.message, b.state, b.message) == ("waiting", "There is no config 'a'.", "waiting", "in use")
    assert (worker.started, c.state) == (["c"], "running")
    worker.wrong.clear()
    worker.ended["c"] = "completed"
    queue.step()
    assert worker.started == ["c", "a"]
    assert queue.find(a.id).message == ""


def test_what_is_refused_again_and_again_goes_on_waiting(queue: Queue, worker: Pretender) -> None:
    queue.add("train", "a")
    worker.refused["a"] = "in use on another machine"
    for _ in range(3):
        queue.step()
        assert [(job.state, job.message) for job in queue.read()] == [("waiting", "in use on another machine")]


def test_jobs_move_and_leave(queue: Queue) -> None:
    ids = [queue.add("train", name).id for name in "abc"]
    queue.move(ids[2], -1)
    queue.move(ids[0], -5)
    assert list(states(queue)) == ["a", "c", "b"]
    queue.move(ids[0], 1)
    queue.move("absent", 1)
    queue.remove(ids[1])
    assert list(states(queue)) == ["c", "a"]
    queue.step()
    queue.remove(ids[2])
    assert states(queue) == {"c": "running", "a": "waiting"}, "what is at work is stopped, not forgotten"
    with pytest.raises(UserError, match="no job 'absent'"):
        queue.find("absent")


def test_what_was_cut_off_goes_on_before_those_that_wait(queue: Queue, worker: Pretender) -> None:
    cut, *_ = [queue.add("train", name, settings={"seed": 1}) for name in "abc"]
    queue.step()
    queue.again(cut.id)
    assert states(queue)["a"] == "running", "what is at work waits for nothing"
    worker.ended["a"] = "interrupted"  # by a reboot, say
    queue.step()
    queue.again(cut.id)
    assert list(states(queue).items()) == [("b", "running"), ("a", "waiting"), ("c", "waiting")]
    assert queue.find(cut.id) == cut
    queue.again("absent")


def test_a_branch_that_was_cut_off_goes_on_instead_of_starting_again(queue: Queue, worker: Pretender) -> None:
    branch = queue.add("train", "a", settings={"seed": 1, "resume_from_checkpoint": "checkpoint-8"})
    queue.step()
    worker.ended["a"] = "interrupted"
    queue.step()
    queue.again(branch.id)
    assert queue.find(branch.id).settings == {"seed": 1}


def test_a_server_that_is_killed_while_it_starts_a_job_leaves_none_that_starts_twice(
    queue: Queue, worker: Pretender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.add("train", "a")

    def die(job: Job) -> Job:
        worker.started.append(job.folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(worker, "start", die)
        with pytest.raises(KeyboardInterrupt):
            queue.step()
    Queue(tmp_path, worker).step()
    assert (worker.started, states(queue)) == (["a"], {"a": "running"})


def test_the_last_ones_that_ended_are_kept(queue: Queue, worker: Pretender) -> None:
    for number in range(module.KEPT + 3):
        queue.add("train", str(number))
        worker.ended[str(number)] = "completed"
        queue.step()
    queue.step()
    assert list(states(queue)) == [str(number) for number in range(3, module.KEPT + 3)]


def test_a_full_disk_starts_nothing_and_loses_nothing(
    queue: Queue, worker: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.add("train", "a")

    def full(path: Path, content: bytes, *, private: bool) -> None:
        raise DiskFullError("no space left")

    before = queue.file.read_bytes()
    monkeypatch.setattr(module, "write_atomically", full)
    for act in (queue.step, lambda: queue.add("train", "b")):
        with pytest.raises(DiskFullError):
            act()
    assert (worker.started, queue.file.read_bytes()) == ([], before)


def test_a_damaged_file_is_kept_and_named(queue: Queue) -> None:
    queue.file.write_text('[{"id": 1}]')
    with pytest.raises(UserError, match=f"{QUEUE_FILE} is not a valid queue"):
        queue.add("train", "a")
    assert queue.file.read_text() == '[{"id": 1}]'


def wait(until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not until():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_of_two_servers_one_serves_and_the_other_takes_over(
    tmp_path: Path, worker: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.01)
    servers = [(Queue(tmp_path, worker), threading.Event()) for _ in range(2)]
    threads = [threading.Thread(target=queue.serve, args=(over,)) for queue, over in servers]
    threads[0].start()
    time.sleep(0.05)
    assert list(tmp_path.iterdir()) == [], "a project without a queue gets no files"
    (first, end), (second, end_too) = servers
    second.add("train", "a")
    wait(lambda: states(first) == {"a": "running"})
    threads[1].start()
    first.file.write_text("damaged")
    wait(lambda: first.problem != "")
    assert "is not a valid queue" in first.problem
    time.sleep(10 * module.PAUSE)
    assert second.problem == ""
    first.file.unlink()
    end.set()
    threads[0].join(PATIENCE)
    second.add("train", "b")
    wait(lambda: states(second) == {"b": "running"})
    end_too.set()
    threads[1].join(PATIENCE)
    assert (tmp_path / SERVER_FILE).is_file()


def test_the_queue_outlives_what_nobody_foresaw(
    queue: Queue, worker: Pretender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.01)
    over, thread = threading.Event(), threading.Thread(target=lambda: queue.serve(over))
    queue.add("train", "a")
    with monkeypatch.context() as odd:
        odd.setattr(worker, "at_work", lambda: [][1])
        thread.start()
        wait(lambda: queue.problem == "list index out of range")
    wait(lambda: states(queue) == {"a": "running"})
    over.set()
    thread.join(PATIENCE)
    assert queue.problem == ""
