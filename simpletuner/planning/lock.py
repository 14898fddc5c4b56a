"""A lock that allows one run at a time in an output folder.

The lock is a file that names its owner. The operating system locks it until the owner's process
ends, however it ends. Some network disks have no locks, or keep those of different machines apart.
So every owner refreshes the time of its file, and a run that finds the name of another machine
watches that time first. Clocks of different machines are never compared.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, BinaryIO

import psutil
from pydantic import Field, TypeAdapter, ValidationError

from simpletuner.atomic import take_lock, write_json
from simpletuner.config.json_reader import read_stored
from simpletuner.errors import UserError, reached_limit
from simpletuner.reporting.wording import clock_text

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
# Beside the lock: config and settings of the last start from the page, and the id of the last event
# before it.
STARTED_FILE = "started.json"
WORKER_FILE = "owner.json"  # in the folder of a comparison: the process that renders it
# ABANDONED_SECONDS has room for twelve refreshes, so a few that fail do not lose the lock.
REFRESH_SECONDS = 15.0
# Longer than a change may take to appear on other machines, and longer than C code usually blocks
# the owner's threads.
ABANDONED_SECONDS = 180.0


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Attributes:
        boot: boot id of the machine; empty if unavailable.
        started: start time of the process, in ticks since boot; empty if unavailable. Together with
            `boot`, it distinguishes the process from a later process with the same pid.
        since: when the lock was taken, in seconds since 1970.
        after: number of the last event of the folder's earlier sessions.
    """

    pid: Annotated[int, Field(gt=0, lt=2**31)]  # 0 and below would be process groups
    host: str
    boot: str
    started: str
    command: str
    since: float
    after: int = -1

    @property
    def lives_here(self) -> bool:
        """Whether the process is alive, on this machine."""
        is_this_boot = (self.host, self.boot) == (socket.gethostname(), boot_id())
        return is_this_boot and psutil.pid_exists(self.pid) and self.started == start_of(self.pid)

    def write(self, file: BinaryIO) -> None:
        """Write the owner to a file of `take`."""
        file.truncate(0)
        file.write(json.dumps(asdict(self), indent=2).encode() + b"\n")
        file.flush()

    def __str__(self) -> str:
        age = clock_text(max(0.0, time.time() - self.since))
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
    over = threading.Event()
    with ExitStack() as held:
        try:
            file = take(path)
            if file is None:
                advice = "Wait for its end, stop it, or choose another output_dir."
                raise in_use(path, read_owner(path), advice)
            held.enter_context(file)
            refuse_if_at_work(path)
            # The page distinguishes sessions by the last event before them, since clocks may be
            # adjusted.
            owner = replace(this_process(), after=after())
            owner.write(file)
        except OSError as error:
            reason = reached_limit(error) or f"{error.strerror}."
            raise UserError(f"output_dir: {str(path)!r} cannot be written: {reason}") from None
        refreshing = threading.Thread(
            target=refresh, args=(path, owner, over), name="lock", daemon=True
        )
        try:
            refreshing.start()
            yield
        finally:
            over.set()
            with suppress(OSError, UserError):
                if read_owner(path) == owner:
                    path.unlink()


def take(path: Path) -> BinaryIO | None:
    """Open and lock a file, until it is closed or the process ends; None if it is locked."""
    file = path.open("a+b")
    if not take_lock(file, wait=False):
        file.close()
        return None
    if is_at(path, file):
        return file
    # Its owner removed the file between our opening and locking it: a lock on a file without a name
    # protects nothing.
    file.close()
    return take(path)


def is_at(path: Path, file: BinaryIO) -> bool:
    """Whether an open file is the one at a path, neither removed nor replaced."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def refresh(path: Path, owner: Owner, over: threading.Event) -> None:
    """Refresh the time of a lock until `over`.

    Exits this process if another machine has taken the lock while this one was frozen.
    """
    while not over.wait(REFRESH_SECONDS):
        with suppress(OSError, UserError):  # retried
            winner = read_owner(path)
            if winner not in (None, owner):
                print(
                    f"{path} was taken over by {winner}, because this process did not refresh it.",
                    file=sys.stderr,
                )
                # Not `sys.exit`, which would end only this thread while training continues to
                # write.
                os._exit(1)
            os.utime(path)


def refuse_if_at_work(path: Path) -> None:
    """Refuse a folder whose lock belongs to a process that is alive, here or on another machine.

    Another machine's lock is watched for longer than its owner would leave it unchanged.

    Raises:
        UserError: the owner is at work.
    """
    owner = None
    with suppress(UserError):  # damaged, but no process holds it
        owner = read_owner(path)
    if owner is None:
        return
    refuse_if_alive(path, owner)
    if owner.host == socket.gethostname():
        return
    logger.info(
        "%s belongs to %s. Waiting up to %g s for a sign of it.", path, owner, ABANDONED_SECONDS
    )
    before = path.stat().st_mtime_ns
    deadline = time.monotonic() + ABANDONED_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, ABANDONED_SECONDS / 10))
        # Opened each time, so that network file systems ask the server.
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mtime_ns != before:
                raise in_use(path, owner, "Wait for its end, or choose another output_dir.")


def refuse_if_alive(path: Path, owner: Owner) -> None:
    """Raise `UserError` if the owner of a lock is alive on this machine."""
    if owner.lives_here:
        raise in_use(path, owner, "Wait for its end, stop it, or choose another output_dir.")


def in_use(path: Path, owner: Owner | None, advice: str) -> UserError:
    """The error for a folder that another run uses, or may use."""
    return UserError(
        f"output_dir: {path.parent} is in use by "
        f"{owner or 'a process that has just started'}. {advice}"
    )


def read_owner(path: Path) -> Owner | None:
    """The owner of a lock; None without a lock, or before its owner has been written.

    Raises:
        UserError: the content is not valid.
    """
    content = b""
    with suppress(FileNotFoundError):  # released in the meantime
        content = path.read_bytes() if path.is_file() else b""
    try:
        return OWNER.validate_json(content) if content else None
    except ValidationError:
        message = (
            f"output_dir: {path} does not say which run it belongs to. If there is none, delete it."
        )
        raise UserError(message) from None


def this_process() -> Owner:
    """This process as the owner of a lock."""
    program = Path(sys.argv[0]).name
    # Without the settings, which may hold secrets.
    command = " ".join([program, *sys.argv[1:2]])
    return owner_of(os.getpid(), command)


def owner_of(pid: int, command: str) -> Owner:
    """A process of this machine as an owner, starting now."""
    return Owner(
        pid=pid,
        host=socket.gethostname(),
        boot=boot_id(),
        started=start_of(pid),
        command=command,
        since=round(time.time(), 3),
    )


@contextmanager
def at_work(folder: Path) -> Iterator[None]:
    """Name this process in the folder of a comparison while it renders."""
    write_json(folder / WORKER_FILE, asdict(this_process()), durable=False)
    try:
        yield
    finally:
        (folder / WORKER_FILE).unlink(missing_ok=True)


def worker_in(folder: Path) -> Owner | None:
    """The process that renders a comparison; None without one, or if it was killed."""
    owner = read_stored(folder / WORKER_FILE, Owner)
    return owner if owner is not None and owner.lives_here else None


def boot_id() -> str:
    """The boot id of this machine; empty if unavailable."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else ""


def start_of(pid: int) -> str:
    """Start time of a process in ticks since boot; empty for zombies and if unavailable."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    # See proc(5). Field 2, the program's name in brackets, may contain spaces and brackets.
    from_field_3 = stat.rpartition(")")[2].split()
    is_zombie = from_field_3[0] == "Z"
    return "" if is_zombie else from_field_3[22 - 3]
