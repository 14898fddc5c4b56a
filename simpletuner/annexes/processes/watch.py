"""Detects processes that died or hang, and ends the others; a thread in every process of a run.

Process 0 holds a connection to every other process; both sides send a heartbeat twice a second. A
decision of process 0 ends all processes; a process that loses process 0 ends itself. Heartbeats
need neither torch nor its store, whose calls block while the process that hosts it is frozen.

| a process                | is detected by                                            | after     |
|--------------------------|-----------------------------------------------------------|-----------|
| was killed               | its kernel closing the connection                         | a second  |
| lost machine or network  | unacknowledged data (TCP_USER_TIMEOUT)                    | 30 s      |
| lost its launcher        | its new parent process                                    | a second  |
| is frozen (SIGSTOP)      | missing heartbeats, though its kernel acknowledges data   | 5 minutes |
| hangs in its main thread | itself: no CPU time, I/O or exchange, not waiting for one | the limit |
| misses an exchange       | the processes that wait in it                             | the limit |
| waits, as all others do  | process 0: every heartbeat reports an idle main thread    | the limit |

C code that holds the GIL (writing a file of 10 GB, importing from a slow disk) stops the threads of
a process for minutes, while its kernel still acknowledges data. Missing heartbeats alone are
therefore judged late, and counted in polls instead of seconds: a process that was starved of CPU
time has not polled either.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from simpletuner.distributed.requests import Stop
from simpletuner.distributed.world import EXCHANGE_SECONDS
from simpletuner.errors import shorten

POLL_SECONDS = 0.5
CUT_OFF_SECONDS = 30.0  # without an acknowledgement, a machine counts as lost
SILENT_SECONDS = 300.0  # without a heartbeat, a process counts as frozen
GRACE_SECONDS = 20.0  # to finish writing a checkpoint, and to report the error
# This much I/O counts as progress. Less may come from a log or a display, whose threads run while
# the main thread hangs.
BYTES_OF_LIFE = 100 << 20
LONGEST_BEAT = 1 << 16  # bytes
# Buffer in bytes for heartbeats that a frozen process does not read; a full one looks like a lost
# connection.
UNREAD_BYTES = 1 << 18
CUT_OFF = "cannot be reached any more: its machine or the network is down"
GONE = "exited without reporting an error: it was killed, or it crashed"
LAUNCHED = "TORCHELASTIC_RUN_ID"  # set by torchrun and accelerate
# Modules in which a main thread waits for other processes. That of checkpoints writes files.
WAITING_IN = ("torch.distributed", "torch.autograd")
WRITING_IN = "torch.distributed.checkpoint"
# Modules of this package that only exchange: their caller says where a process is.
EXCHANGING = ("simpletuner.distributed.world", "simpletuner.annexes.processes.joining")
Failure = tuple[str, int]  # message, exit code


@dataclass(frozen=True)
class Beat:
    """The heartbeat of a process.

    Attributes:
        key: identifies the run.
        doing: the exchange in which the process waits; empty outside one.
        seconds: time since the exchange began.
        still: seconds without progress, while the main thread waits for other processes.
        stop: a stop was requested in this process.
        ready: all processes are connected.
        leaving: the process is about to close the connection.
        failure: message and exit code with which all processes end.
    """

    rank: int
    size: int
    host: str
    key: str
    doing: str = ""
    seconds: float = 0.0
    still: float = 0.0
    stop: bool = False
    ready: bool = False
    leaving: bool = False
    failure: tuple[str, int] | None = None

    def __str__(self) -> str:
        return f"{self.rank} on {self.host}"


class Link:
    """A connection to the watch of another process.

    Attributes:
        beat: the latest heartbeat.
        silent: polls since then.
        end: why the connection was closed.
    """

    def __init__(self, connection: socket.socket, beat: Beat | None = None) -> None:
        self.connection = connection
        self.beat = beat
        self.silent = 0
        self.is_open = True
        self.end = GONE
        self._unread = b""
        # A frozen process stops reading; writing to it must not block this watch.
        connection.settimeout(POLL_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD_BYTES)
        if sys.platform == "linux":
            milliseconds = int(1000 * CUT_OFF_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    @property
    def failure(self) -> Failure | None:
        """The failure in the latest heartbeat."""
        return self.beat.failure if self.beat else None

    def receive(self) -> None:
        """Read the received bytes."""
        try:
            arrived = self.connection.recv(LONGEST_BEAT)
            self._parse(arrived)
        except (ConnectionError, ValueError, TypeError):  # closed by the kernel, or not a heartbeat
            arrived = b""
        except OSError as error:
            if error.errno is None:  # timeout: nothing was received
                return
            arrived = b""
            self.end = CUT_OFF  # data was not acknowledged
        # An endless line is not a heartbeat.
        if not arrived or len(self._unread) >= LONGEST_BEAT:
            self.is_open = False

    def _parse(self, arrived: bytes) -> None:
        """Take the latest heartbeat from the received bytes.

        Raises:
            ValueError, TypeError: a line is not a heartbeat.
        """
        *lines, self._unread = (self._unread + arrived).split(b"\n")
        if lines:
            # Later heartbeats repeat requests and failures, so the last one is enough.
            self.beat = Beat(**json.loads(lines[-1]))
            self.silent = 0

    def send(self, beat: Beat) -> None:
        """Send a heartbeat; a broken connection is detected when reading."""
        with suppress(OSError):
            self.connection.sendall(json.dumps(asdict(beat)).encode() + b"\n")


@dataclass
class Pulse:
    """Whether the main thread of this process makes progress.

    Attributes:
        marks: progress counter; see `Watch.mark`.
        still: seconds without progress.
        idle: seconds without progress, and without waiting for other processes.
    """

    marks: int = 0
    still: float = 0.0
    idle: float = 0.0
    _seen: tuple[int, ...] = ()
    _looked: float = 0.0

    def look(self, limit: float) -> None:
        """Update the durations; called every `POLL_SECONDS`."""
        now = time.monotonic()
        # More time has passed if this process was stopped, which is not its main thread's fault.
        passed = min(now - self._looked, 2 * POLL_SECONDS)
        signs = (self.marks, *signs_of_life(limit / 100))
        if signs != self._seen:
            self.still = 0.0
            self.idle = 0.0
        else:
            self.still += passed
            _, waits_for_others = main_thread_position()
            self.idle = 0.0 if waits_for_others else self.idle + passed
        self._seen = signs
        self._looked = now


def signs_of_life(unit: float) -> tuple[int, int]:
    """(CPU time of the main thread, I/O of this process), in whole units.

    Args:
        unit: seconds of CPU time that count as a sign; `BYTES_OF_LIFE` is that of I/O.
    """
    if sys.platform != "linux":
        return int(time.process_time() / unit), 0
    clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
    moved = 0
    with suppress(OSError):  # forbidden in some containers
        for line in Path("/proc/self/io").read_text().splitlines():
            moved += int(line.split()[1])  # such as "read_bytes: 4096"
    return int(time.clock_gettime(clock) / unit), moved // BYTES_OF_LIFE


def main_thread_position() -> tuple[str, bool]:
    """(the line of this package that the main thread executes, whether it waits for others)."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    waits = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        waits |= module.startswith(WAITING_IN) and not module.startswith(WRITING_IN)
        if module.startswith("simpletuner.") and module not in EXCHANGING:
            return f"{module}, line {frame.f_lineno}", waits
        frame = frame.f_back
    return "code that is not simpletuner's", waits


class Links:
    """Connections to other processes: in process 0 to all of them, in the others to process 0.

    Attributes:
        by_rank: the connections to processes of this run.
    """

    def __init__(self) -> None:
        self.by_rank: dict[int, Link] = {}
        self._unidentified: list[Link] = []  # connections without a heartbeat yet
        self._selector = selectors.DefaultSelector()

    def listen(self, address: str, size: int) -> int:
        """Listen for `size` processes; returns the port.

        Args:
            address: an IPv4 address; empty for all addresses of this machine.
        """
        # MASTER_ADDR may resolve to IPv4 or IPv6.
        takes_both = not address and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            (address, 0),
            family=socket.AF_INET6 if takes_both else socket.AF_INET,
            backlog=size,
            dualstack_ipv6=takes_both,
        )
        self._selector.register(listener, selectors.EVENT_READ)
        return int(listener.getsockname()[1])

    def add(self, link: Link, rank: int | None = None) -> None:
        """Add a connection; its rank may not be known yet."""
        self._selector.register(link.connection, selectors.EVENT_READ, link)
        if rank is None:
            self._unidentified.append(link)
        else:
            self.by_rank[rank] = link

    def receive(self, own: Beat) -> None:
        """Read heartbeats for `POLL_SECONDS`, or until a connection closes or a failure arrives."""
        deadline = time.monotonic() + POLL_SECONDS
        while True:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                is_event = self._receive_from(key)
                if is_event:
                    # Only read what has already arrived: the watch must judge the event now.
                    deadline = 0.0
        for link in self._unidentified:
            self._admit(link, own)
        self._unidentified = [
            link for link in self._unidentified if link.beat is None and link.is_open
        ]

    def _receive_from(self, key: selectors.SelectorKey) -> bool:
        """Read a connection, or accept one.

        Returns:
            whether it has closed, or reports a failure that it did not report before.
        """
        if not isinstance(key.data, Link):  # the listener
            assert isinstance(key.fileobj, socket.socket)
            with suppress(OSError):  # the peer has disconnected
                self.add(Link(key.fileobj.accept()[0]))
            return False
        link = key.data
        failure_before = link.failure
        link.receive()
        if not link.is_open:
            self._selector.unregister(key.fileobj)
            link.connection.close()
        return not link.is_open or link.failure != failure_before

    def _admit(self, link: Link, own: Beat) -> None:
        """Accept a connected process, or send it the reason for its refusal."""
        beat = link.beat
        if beat is None or beat.key != own.key:  # of another run
            return
        refusal = self._why_refused(beat, own)
        if refusal is None:
            self.by_rank[beat.rank] = link
            return
        message = (
            f"MASTER_ADDR: {refusal}. Ranks must differ within a run, and MASTER_PORT between runs."
        )
        link.send(replace(own, failure=(message, 2)))

    def _why_refused(self, beat: Beat, own: Beat) -> str | None:
        """Why a process cannot take part in this run; None if it can."""
        if beat.size != own.size:
            return f"process {beat} is one of {beat.size}, {own} is one of {own.size}"
        holder = own
        if beat.rank != own.rank:
            link = self.by_rank.get(beat.rank)
            if link is None or link.beat is None:
                return None
            holder = link.beat
        return f"process {holder} already runs, so {beat} is one too many"

    def beats(self) -> list[Beat]:
        """The latest heartbeats of the other processes."""
        return [link.beat for link in list(self.by_rank.values()) if link.beat is not None]

    def send(self, beat: Beat) -> None:
        """Send a heartbeat to all other processes."""
        for link in self.by_rank.values():
            link.send(beat)

    def close(self) -> None:
        """Close all connections."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()


class EndReporter:
    """What this process does when the watch is about to end it; by default nothing."""

    def on_joined(self) -> None:
        """All processes have joined. From now on, the failure of another process ends this one."""

    def on_ended(self, message: str, code: int) -> None:
        """The watch is about to end this process, with this message and exit code."""

    def on_leader_lost(self, message: str) -> None:
        """Process 0, which prints errors, is lost; on_ended follows."""


class Watch:
    """The thread of this process that monitors the others.

    Attributes:
        limit: seconds that a process may wait for another one that makes no progress.
        reporter: reports the end of this process.
        stop: a stop requested in one process is forwarded to all.
        writing: held while this process must not be ended.
        verdict: message and exit code with which all processes end.
    """

    def __init__(self, rank: int, size: int, key: str, limit: float = EXCHANGE_SECONDS) -> None:
        self.links = Links()
        self.pulse = Pulse()
        self.limit = limit
        self.reporter = EndReporter()
        self.stop = Stop()
        self.writing = threading.Lock()
        self.verdict: Failure | None = None
        self.own = Beat(rank, size, socket.gethostname(), key)
        self._failure: Failure | None = None  # of this process
        self._parent = os.getppid()
        self._exchange: tuple[str, float] | None = None
        self._over = threading.Event()
        self._decided = threading.Event()
        # While it is set, the main thread ends this process, and the watch leaves it alone.
        self._ends_itself = threading.Event()
        self._ends_itself.set()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def begin(self, seconds: float) -> list[int]:
        """Start, and wait up to some seconds for all processes; returns the missing ranks."""
        self._thread.start()
        deadline = time.monotonic() + seconds
        missing = self._missing()
        while missing and self.verdict is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
            missing = self._missing()
        if not missing:
            self.own = replace(self.own, ready=True)
        return missing

    def enforce(self) -> None:
        """From now on, end this process if another one fails."""
        self.reporter.on_joined()
        self._ends_itself.clear()

    def close(self) -> None:
        """Sign off from the others, which would otherwise report this process as killed."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def mark(self) -> None:
        """Record progress of the main thread."""
        self.pulse.marks += 1

    @contextmanager
    def exchanging(self, what: str) -> Iterator[None]:
        """A context that all processes enter and in which they wait for each other."""
        self.mark()
        self._exchange = what, time.monotonic()
        try:
            yield
        finally:
            self._exchange = None

    def wait_for_verdict(self, seconds: float) -> Failure | None:
        """Wait up to some seconds for the verdict.

        From now on, the main thread ends this process itself.
        """
        # With the lock: the watch holds it from its decision to end this process until that end.
        with self.writing:
            self._ends_itself.set()
        self._decided.wait(seconds)
        return self.verdict

    def fail(self, message: str, code: int, linger: float = 0.0) -> Failure:
        """Announce that this process fails; returns message and exit code of the first failure.

        Args:
            linger: maximum seconds to wait afterwards: process 0 until the others have the verdict,
                the others until process 0 has exited.
        """
        self._failure = self._failure or (message, code)
        first = self.wait_for_verdict(GRACE_SECONDS) or (message, code)
        deadline = time.monotonic() + linger
        while self._is_needed() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
        return first

    def _missing(self) -> list[int]:
        """The ranks that have not connected; process 0 alone knows all of them."""
        if self.own.rank == 0:
            return [rank for rank in range(1, self.own.size) if rank not in self.links.by_rank]
        return [] if any(beat.ready for beat in self.links.beats()) else [0]

    def _is_needed(self) -> bool:
        """Whether this process must stay a moment longer."""
        if not self.links.by_rank:
            return False
        if self.own.rank > 0:
            return True  # until process 0 has exited, which prints the error
        # Process 0 stays until all processes have its verdict.
        return not all(beat.leaving for beat in self.links.beats())

    def _run(self) -> None:
        """The thread: look until the end, and end this process once there is a verdict."""
        decided_at = time.monotonic()
        while not self._over.is_set():
            self._look()
            if self.verdict is None:
                decided_at = time.monotonic()
                continue
            # A main thread that ends the process itself has a minute; then it counts as hanging.
            is_late = time.monotonic() > decided_at + 3 * GRACE_SECONDS
            self._end(*self.verdict, is_late=is_late)
        self.links.send(replace(self._report(), leaving=True))
        self.links.close()

    def _look(self) -> None:
        """Exchange heartbeats once, and judge all processes by them."""
        self.links.send(self._report())
        self.links.receive(self.own)
        for rank, link in list(self.links.by_rank.items()):
            self._judge(rank, link)
        self._judge_itself()
        if self.own.rank == 0:
            self._judge_exchange()
        if self.verdict is not None:
            self.links.send(self._report())

    def _report(self) -> Beat:
        """The next heartbeat of this process."""
        what, since = self._exchange or ("", time.monotonic())
        return replace(
            self.own,
            doing=what,
            seconds=time.monotonic() - since,
            # Idle time outside exchanges is reported by `_judge_itself`, with the line of code.
            still=0.0 if self.pulse.idle else self.pulse.still,
            stop=self.stop.requested,
            failure=self.verdict or self._failure,
            leaving=self.verdict is not None,
        )

    def _judge(self, rank: int, link: Link) -> None:
        """Judge another process by its connection and its latest heartbeat."""
        link.silent += 1  # polls, see the module's docstring
        beat = link.beat
        assert beat is not None
        if beat.failure is not None:
            self._decide(*beat.failure)
        if beat.stop:
            self.stop.request()
        why = ""
        if not link.is_open:
            del self.links.by_rank[rank]
            why = "" if beat.leaving else link.end
        elif link.silent * POLL_SECONDS > SILENT_SECONDS:
            why = f"has not responded for {SILENT_SECONDS:g} s: it or its machine is frozen"
        if why and self.verdict is None:
            message = f"Process {beat} {why}."
            self._decide(message, 1)
            if rank == 0:
                self.reporter.on_leader_lost(message)

    def _judge_itself(self) -> None:
        """Find out whether this process has lost its launcher, or its main thread hangs."""
        if os.getppid() != self._parent and LAUNCHED in os.environ:
            self._failure = self._failure or (f"The launcher of process {self.own} was killed.", 1)
        self.pulse.look(self.limit)
        if self.pulse.idle > self.limit:
            line, _ = main_thread_position()
            message = f"Process {self.own} has made no progress for {self.limit:g} s in {line}."
            self._failure = self._failure or (message, 1)
        # Only process 0 decides, so that all end for the same reason; it receives the failures of
        # the others with their heartbeats.
        if self.own.rank == 0 and self._failure:
            self._decide(*self._failure)

    def _judge_exchange(self) -> None:
        """In process 0: find processes that wait too long in an exchange, or for each other."""
        beats = [self._report(), *self.links.beats()]
        absent = shorten([str(beat) for beat in beats if not beat.doing], 4)
        cause = f"process {absent}" if absent else "an exchange of tensors between the processes"
        for beat in beats:
            if beat.doing and beat.seconds > self.limit:
                self._decide(f"{beat.doing} has waited {self.limit:g} s for {cause}.", 1)
        if all(beat.still > self.limit for beat in beats):
            line, _ = main_thread_position()
            message = (
                f"All processes have waited {self.limit:g} s for each other, process {self.own} in "
                f"{line}."
            )
            self._decide(message, 1)

    def _decide(self, message: str, code: int) -> None:
        """Take the first verdict, and ignore later ones, which are its consequences."""
        if self.verdict is None:
            self.verdict = message, code
            self._decided.set()

    def _end(self, message: str, code: int, *, is_late: bool) -> None:
        """End this process, whose main thread may be blocked in a library for a lost process."""
        if self._ends_itself.is_set():
            if is_late:
                os._exit(code)
            return
        # Not while a checkpoint is written, unless that takes too long.
        is_held = self.writing.acquire(timeout=GRACE_SECONDS)
        if self._ends_itself.is_set():  # set while waiting
            if is_held:
                self.writing.release()
            return
        # In another thread, since the main thread may hold a lock that the report needs.
        report = threading.Thread(target=self.reporter.on_ended, args=(message, code), daemon=True)
        report.start()
        report.join(GRACE_SECONDS)
        deadline = time.monotonic() + POLL_SECONDS * 6
        while self._is_needed() and time.monotonic() < deadline:
            self._look()
        # `sys.exit` would only end this thread.
        os._exit(code)
