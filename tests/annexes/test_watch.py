"""A lost, frozen or foreign process is noticed by the others."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from simpletuner.annexes.processes import joining, watch
from simpletuner.annexes.processes.joining import ConnectedWorld, join_watch, open_store
from simpletuner.annexes.processes.watch import (
    GONE,
    Beat,
    EndReporter,
    Link,
    Pulse,
    Watch,
    main_thread_position,
)
from simpletuner.distributed.world import World
from simpletuner.errors import UserError
from tests.tools.processes import free_port

HOST = socket.gethostname()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Watch | str]]]:
    """The running watches of processes that share a store, or why they have none."""
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.05)
    running: list[Watch] = []

    def join(*places: World, seconds: float = 60.0) -> list[Watch | str]:
        store: Any = HashStore()
        results: list[Watch | str] = [""] * len(places)

        def run(index: int, place: World) -> None:
            try:
                process_watch = join_watch(place, store, 60.0, time.monotonic() + seconds)
                running.append(process_watch)
                results[index] = process_watch
            except UserError as error:
                results[index] = str(error)

        threads = [
            threading.Thread(target=run, args=(index, place)) for index, place in enumerate(places)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    yield join
    for process_watch in running:
        process_watch.close()


def both(results: list[Watch | str]) -> tuple[Watch, Watch]:
    first, second = results
    assert isinstance(first, Watch), first
    assert isinstance(second, Watch), second
    return first, second


Joined = Callable[..., list[Watch | str]]


class LossReporter(EndReporter):
    """Notes what it reports of the loss of process 0."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def on_leader_lost(self, message: str) -> None:
        self.messages.append(message)


@pytest.mark.parametrize("rank", [0, 1])
def test_broken_connection_ends_all_processes(joined: Joined, rank: int) -> None:
    pair = both(joined(World(0, 2), World(1, 2)))
    reporter = LossReporter()
    pair[1 - rank].reporter = reporter
    for link in list(pair[rank].links.by_rank.values()):
        link.connection.shutdown(socket.SHUT_RDWR)  # as the kernel does for a process that it kills
    message = f"Process {rank} on {HOST} {GONE}."

    assert pair[1 - rank].wait_for_verdict(60.0) == (message, 1)
    if rank == 0:
        assert reporter.messages == [message], "without process 0, process 1 reports the loss"
    else:
        assert reporter.messages == []


def test_process_that_leaves_is_not_taken_for_killed(joined: Joined) -> None:
    first, second = both(joined(World(0, 2), World(1, 2)))

    second.close()

    assert first.wait_for_verdict(0.5) is None


def test_lost_process_is_named_even_if_the_watch_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine, gloo may notice that a process was killed some seconds before the watch
    looks.
    """
    monkeypatch.setattr(joining, "POLL_SECONDS", 0.01)
    late = Watch(0, 2, "key", 60.0)
    threading.Timer(0.2, late._decide, ("Process 1 is gone.", 1)).start()

    world = ConnectedWorld(0, 2, 0, 2, control=None, watch=late)
    closed = RuntimeError("[gloo/transport] Connection closed by peer")
    assert world.first_failure(closed) == "Process 1 is gone."

    healthy = Watch(0, 2, "key", 60.0)
    world = ConnectedWorld(0, 2, 0, 2, control=None, watch=healthy)
    assert world.first_failure(ValueError()) is None


def test_first_failure_ends_all_processes(joined: Joined) -> None:
    first, second = both(joined(World(0, 2), World(1, 2)))
    assert second.fail("a mistake", 2) == ("a mistake", 2)
    assert first.fail("another one", 1) == ("a mistake", 2)

    first._decide("another one", 1)
    assert first.verdict == ("a mistake", 2)


def test_process_that_ends_itself_is_given_time(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report of a failure that both have is not answered: the answer would be answered again."""
    first, second = both(joined(World(0, 2), World(1, 2)))
    looks: list[float] = []
    monkeypatch.setattr(first, "_end", lambda message, code, *, is_late: looks.append(is_late))
    started = time.monotonic()
    second.fail("a mistake", 2)

    time.sleep(1.0)

    # A look every POLL_SECONDS = 0.05 s makes 20 a second; twice as many are tolerated.
    assert len(looks) < 40 * (time.monotonic() - started)
    assert not any(looks)


def test_killed_launcher_ends_all_processes(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(watch.LAUNCHED, "1")
    first, second = both(joined(World(0, 2), World(1, 2)))

    second._parent = 2**30

    assert first.wait_for_verdict(60.0) == (f"The launcher of process 1 on {HOST} was killed.", 1)


def test_stop_request_reaches_all_processes(joined: Joined) -> None:
    first, second = both(joined(World(0, 2), World(1, 2)))
    second.stop.request()
    deadline = time.monotonic() + 60

    while not first.stop.requested and time.monotonic() < deadline:
        time.sleep(0.05)

    assert first.stop.requested


@pytest.mark.parametrize("silent", [0, 1])
def test_frozen_process_is_reported_after_the_silence_limit(
    joined: Joined, monkeypatch: pytest.MonkeyPatch, silent: int
) -> None:
    pair = both(joined(World(0, 2), World(1, 2)))
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.5)
    # As if it were frozen: connected, but it sends nothing.
    monkeypatch.setattr(pair[silent], "_look", lambda: time.sleep(0.05))

    assert pair[1 - silent].wait_for_verdict(60.0) == (
        f"Process {silent} on {HOST} has not responded for 0.5 s: it or its machine is frozen.",
        1,
    )


def test_idle_time_counts_only_while_the_main_thread_does_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    signs = [(0, 0)]
    place = [("here", False)]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "POLL_SECONDS", 400.0)
    monkeypatch.setattr(watch, "signs_of_life", lambda unit: signs[0])
    monkeypatch.setattr(watch, "main_thread_position", lambda: place[0])
    pulse = Pulse()

    def after(*pauses: float) -> list[float]:
        idle_seconds = []
        for seconds in pauses:
            now[0] += seconds
            pulse.look(1800.0)
            idle_seconds.append(pulse.idle)
        return idle_seconds

    assert after(0.0, 600.0, 600.0) == [0.0, 600.0, 1200.0]
    assert after(9000.0) == [2000.0], "it was stopped for a while, and could not do anything"

    signs[0] = (1, 0)
    assert after(600.0, 600.0) == [0.0, 600.0], "it computes"

    pulse.marks += 1
    assert after(600.0, 600.0) == [0.0, 600.0], "it reports"

    place[0] = "here", True
    assert after(600.0, 600.0) == [0.0, 0.0], "it waits for others"
    assert pulse.still == 1800.0


@pytest.mark.parametrize(
    ("module", "waits"),
    [
        ("torch.distributed.distributed_c10d", True),
        ("torch.distributed.fsdp._fully_shard._fsdp_collectives", True),
        ("torch.autograd.graph", True),
        ("torch.distributed.checkpoint.filesystem", False),  # a disk that hangs
        ("torch.nn.modules.module", False),
    ],
)
def test_waiting_for_other_processes_is_told_from_hanging(module: str, waits: bool) -> None:
    hanging: dict[str, Any] = {"__name__": module}
    exec("def hang(until): until()", hanging)
    ours: dict[str, Any] = {"__name__": "simpletuner.training.sharding"}
    exec("def save(hang, until):\n    hang(until)", ours)
    places: list[tuple[str, bool]] = []

    def look() -> None:
        looking = threading.Thread(target=lambda: places.append(main_thread_position()))
        looking.start()
        looking.join()

    ours["save"](hanging["hang"], look)

    assert places == [("simpletuner.training.sharding, line 2", waits)]


def test_processes_that_wait_for_one_another_are_ended(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "signs_of_life", lambda unit: (0, 0))
    monkeypatch.setattr(watch, "main_thread_position", lambda: ("a collective", True))
    pair = both(joined(World(0, 2), World(1, 2)))
    pair[0].limit = 0.5
    message = (
        f"All processes have waited 0.5 s for each other, process 0 on {HOST} in a collective."
    )

    assert [process.wait_for_verdict(60.0) for process in pair] == [(message, 1)] * 2


def test_beat_ends_the_silence_and_progress_ends_the_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = Link(socket.create_connection(server.getsockname()))
        receiver = Link(server.accept()[0])
    first = Watch(0, 2, "key", 0.5)
    first.pulse.still = 9.0
    first.links.by_rank[1] = receiver

    for still in (0.0, 9.0):
        receiver.silent = 5
        sender.send(Beat(1, 2, "x", "key", still=still))
        receiver.receive()
        first._judge_exchange()
        assert receiver.silent == 0
        # Only if both have been still for longer than the limit do they wait for each other.
        is_ended = first.verdict is not None
        assert is_ended == (still > 0)

    sender.connection.close()
    receiver.connection.close()


@pytest.mark.slow
def test_surplus_and_missing_processes_are_reported(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")

    results = joined(World(0, 3), World(1, 3), World(0, 3), World(1, 3), seconds=2.0)

    messages = [str(result) for result in results]
    assert sum("process 0 already runs on" in message for message in messages) == 1, messages
    assert (
        sum("so 1 on" in message and "is one too many" in message for message in messages) == 1
    ), messages

    missing = [message for message in messages if "process 2 of 3 did not join" in message]
    assert len(missing) == 2, "those that have come end together"


@pytest.mark.slow
def test_processes_with_different_world_sizes_are_refused(joined: Joined) -> None:
    messages = [str(result) for result in joined(World(0, 2), World(1, 3), seconds=2.0)]
    assert f"process 1 on {HOST} is one of 3, 0 on {HOST} is one of 2" in messages[1]


def test_single_machine_run_listens_on_loopback_only(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.2")  # as torchrun may name an address of the network
    _, second = both(joined(World(0, 2, 0, 2), World(1, 2, 1, 2)))

    address, port = second.links.by_rank[0].connection.getpeername()

    assert address == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))


def test_process_that_ends_itself_is_not_killed_during_a_long_write(joined: Joined) -> None:
    first, _ = both(joined(World(0, 2), World(1, 2)))

    class Busy:
        """The lock of a long write, which the main thread gets before the watch does."""

        def acquire(self, timeout: float) -> bool:
            first._ends_itself.set()
            return False

        def release(self) -> None:
            raise RuntimeError("release unlocked lock")

    first._ends_itself.clear()
    first.writing = Busy()  # type: ignore[assignment]
    first._end("gone", 1, is_late=False)


def test_connection_without_the_key_is_ignored(joined: Joined) -> None:
    first, second = both(joined(World(0, 2), World(1, 2)))
    port = second.links.by_rank[0].connection.getpeername()[1]

    for content in (
        b"GET / HTTP/1.1\n\n",
        b"{}\n",
        json.dumps(vars(Beat(1, 2, "x", "guess"))).encode() + b"\n",
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(content)
            stranger.settimeout(0.2)
            with suppress(OSError):
                assert not stranger.recv(1), "an answer would hold the key of the run"

    assert first.wait_for_verdict(0.5) is None
    assert list(first.links.by_rank) == [1]


@pytest.mark.slow(3)
def test_unreachable_address_and_port_in_use_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))

    with pytest.raises(
        UserError,
        match=f"MASTER_ADDR: process 1 on {HOST} cannot reach process 0 at 127.0.0.1:{port}",
    ):
        open_store(World(1, 2), "env://", time.monotonic())
    with (
        socket.create_server(("0.0.0.0", port), reuse_port=False),
        pytest.raises(UserError, match=f"MASTER_PORT: 127.0.0.1:{port} on {HOST} is in use"),
    ):
        open_store(World(0, 2), "env://", time.monotonic())
