"""A lock that allows one run at a time in an output folder.

The lock is a file that names its owner. A run takes over a stale lock, whose process has ended. Processes on another
machine cannot be checked, so every owner writes a heartbeat, a counter, into its lock, and a run that wants the folder
watches the counter by its own clock. File times and clocks of different machines are never compared.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import psutil
from pydantic import Field, TypeAdapter, ValidationError

from simpletuner.atomic import hold
from simpletuner.errors import UserError
from simpletuner.reporting.pace import clock

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
# ABANDONED_SECONDS has room for twelve heartbeats, so a few failed writes do not lose the lock.
REFRESH_SECONDS = 15.0
# Longer than a file may take to appear on other machines, and longer than C code usually blocks the owner's threads.
ABANDONED_SECONDS = 180.0


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Attributes:
        boot: boot id of the machine; empty if unavailable.
        started: start time of the process, in ticks since boot; empty if unavailable. Together with `boot`, it
            distinguishes the process from a later process with the same pid.
        since: when the lock was taken, in seconds since 1970.
        after: number of the last event of the folder's earlier sessions.
        beat: heartbeat counter, with a fixed number of digits; zero if the owner cannot write to its lock.
    """

    pid: Annotated[int, Field(gt=0, lt=2**31)]  # 0 and below would be process groups
    host: str
    boot: str
    started: str
    command: str
    since: float
    after: int = -1
    beat: str = f"{0:08}"  # fixed width, since it is rewritten in place

    @property
    def content(self) -> bytes:
        """The content of the lock file."""
        return json.dumps(asdict(self), indent=2).encode() + b"\n"

    def holds(self, path: Path) -> bool:
        """Whether a lock belongs to this owner, whatever its heartbeat."""
        return replace(read_owner(path, path.read_bytes()), beat=self.beat) == self

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; valid only on the owner's host."""
        if self.boot != boot_id():
            return True
        return not psutil.pid_exists(self.pid) or self.started != start_of(self.pid)

    @property
    def counts_elsewhere(self) -> bool:
        """Whether the owner is on another machine and writes heartbeats."""
        return self.beat != Owner.beat and self.host != socket.gethostname()

    def __str__(self) -> str:
        age = clock(max(0.0, time.time() - self.since))
        return f"process {self.pid} on {self.host} (`{self.command}`, started {age} ago)"


OWNER = TypeAdapter(Owner)


@contextmanager
def lock_output(folder: Path, after: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Hold a folder's lock within this context.

    Args:
        after: reads the number of the last event of the folder's earlier sessions.

    Raises:
        UserError: another run holds the lock, or may hold it.
    """
    path = folder / LOCK_FILE
    try:
        # The page distinguishes sessions by the last event before them, since clocks may be adjusted.
        owner = replace(this_process(), after=after())
        while not create(path, owner.content) and not take_over(path, owner.content):
            pass  # the lock was released in between
    except OSError as error:
        raise UserError(f"output_dir: {str(path)!r} cannot be written: {error.strerror}.") from None
    over = threading.Event()
    refreshing = threading.Thread(target=refresh, args=(path, owner, over), name="lock", daemon=True)
    refreshing.start()
    try:
        yield
    finally:
        over.set()
        refreshing.join(REFRESH_SECONDS)  # with a timeout, since the disk may hang
        with suppress(OSError, UserError):  # deleted, or damaged
            if owner.holds(path):
                path.unlink()


def refresh(path: Path, owner: Owner, over: threading.Event) -> None:
    """Write heartbeats until `over`; exits this process if another one, which now owns the folder, took the lock."""
    for beat in itertools.count(1):
        with suppress(OSError, UserError), path.open("r+b") as file:  # a failed heartbeat is retried
            hold(file)
            if not owner.holds(path):
                winner = read_owner(path, file.read())
                print(f"{path} was taken over by {winner}, because this process wrote no heartbeat.", file=sys.stderr)
                # Not `sys.exit`, which would end only this thread while training continues to write.
                os._exit(1)
            file.seek(0)
            file.write(replace(owner, beat=f"{beat:08}").content)
        if over.wait(REFRESH_SECONDS):
            return


def create(path: Path, content: bytes, mode: int = 0o666) -> bool:
    """Create a file with its content atomically; False if it already exists."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(content)
        try:
            os.link(draft, path)  # unlike rename, fails if the name exists
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            return create_in_place(path, content, mode)
    finally:
        draft.unlink(missing_ok=True)
    return True


def create_in_place(path: Path, content: bytes, mode: int = 0o666) -> bool:
    """Create a file, then write its content; a kill in between leaves an empty lock that the user must delete."""
    try:
        with open(path, "xb", opener=partial(os.open, mode=mode)) as file:
            try:
                file.write(content)
                file.flush()
            except OSError:  # on a full disk, an empty lock would block every later start
                path.unlink()
                raise
    except FileExistsError:
        return False
    return True


def take_over(path: Path, content: bytes) -> bool:
    """Take over a stale lock; False if the lock has been removed meanwhile.

    Raises:
        UserError: the owner is alive, or on another machine without heartbeats.
    """
    with suppress(FileNotFoundError):
        seen = path.read_bytes()
        owner = read_owner(path, seen)
        if owner.counts_elsewhere:
            refuse_if_it_counts(path, seen)
        else:
            refuse_if_in_use(path, owner)
        with path.open("r+b") as file:
            hold(file)  # only one of several processes may take over
            if file.read() != seen:
                return False
            file.seek(0)
            file.truncate()
            file.write(content)
            file.flush()
            # The lock may have been deleted and recreated since it was read.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                logger.info("Took over %s: %s has ended without removing it.", path, owner)
                return True
    return False


def refuse_if_it_counts(path: Path, seen: bytes) -> None:
    """Watch a lock for longer than a live owner on another machine would leave it unchanged.

    Raises:
        UserError: the lock has changed.
    """
    owner = read_owner(path, seen)
    logger.info("%s belongs to %s. Waiting up to %g s for a heartbeat.", path, owner, ABANDONED_SECONDS)
    deadline = time.monotonic() + ABANDONED_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, ABANDONED_SECONDS / 10))
        if path.read_bytes() != seen:  # opened each time, so that network file systems revalidate it
            raise in_use(path, owner, "Wait for its end, or choose another output_dir.")


def refuse_if_in_use(path: Path, owner: Owner) -> None:
    """Raise unless the owner of a lock has certainly ended.

    Raises:
        UserError: the owner is alive, or on another machine.
    """
    if owner.host != socket.gethostname():
        advice = f"If it has ended, delete {path} and start again; otherwise choose another output_dir."
        raise in_use(path, owner, f"Whether that run is still going cannot be seen from this machine. {advice}")
    if not owner.is_gone:
        raise in_use(path, owner, "Wait for its end, stop it, or choose another output_dir.")


def in_use(path: Path, owner: Owner, advice: str) -> UserError:
    """The error for a folder that another run uses, or may use."""
    return UserError(f"output_dir: {path.parent} is in use by {owner}. {advice}")


def read_owner(path: Path, content: bytes) -> Owner:
    """Parse the owner of a lock.

    Raises:
        UserError: the content is not valid.
    """
    try:
        return OWNER.validate_json(content)
    except ValidationError:
        message = f"output_dir: {path} does not say which run it belongs to. If there is none, delete it."
        raise UserError(message) from None


def this_process() -> Owner:
    """This process as the owner of a lock."""
    return owner_of(os.getpid(), " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]]))  # settings may hold secrets


def owner_of(pid: int, command: str) -> Owner:
    """A process of this machine as an owner, starting now."""
    return Owner(pid, socket.gethostname(), boot_id(), start_of(pid), command, round(time.time(), 3))


def boot_id() -> str:
    """The boot id of this machine; empty if unavailable."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else ""


def start_of(pid: int) -> str:
    """Start time of a process in ticks since boot; empty for zombies and if unavailable."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    # Fields 3 and 22 of proc(5); field 2, the program name in brackets, may contain spaces.
    return "" if fields[0] == "Z" else fields[19]
