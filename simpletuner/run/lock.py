"""A lock that allows one run at a time in an output folder.

The lock is a file that names its owner. A run takes over a lock whose process has ended. A process on another machine
cannot be asked, so every owner writes a heartbeat, a count, into its lock, and a run that wants the folder watches the
count by its own clock. File times and the clocks of two machines are never compared.
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
# Twelve beats fit into ABANDONED_SECONDS: a few failed writes do not lose the lock.
REFRESH_SECONDS = 15.0
# Longer than a file may take to appear on other machines, and than C code usually keeps the owner's threads waiting.
ABANDONED_SECONDS = 180.0


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Attributes:
        boot: identifies the boot of the machine; empty if the system does not report it.
        started: when the process started, in ticks since boot; empty if the system does not report it. With `boot` it
            distinguishes the process from a later one with the same pid.
        since: when the lock was taken, in seconds since 1970.
        after: the last event of the folder's earlier sessions.
        beat: counts while the process lives, always with the same digits; zero if it cannot write to its lock.
    """

    pid: Annotated[int, Field(gt=0, lt=2**31)]  # 0 and less would be groups of processes
    host: str
    boot: str
    started: str
    command: str
    since: float
    after: int = -1
    beat: str = f"{0:08}"  # a rewrite in place leaves no tail of a longer number

    @property
    def content(self) -> bytes:
        """The lock as a file."""
        return json.dumps(asdict(self), indent=2).encode() + b"\n"

    def holds(self, path: Path) -> bool:
        """Whether a lock belongs to this owner, at any heartbeat."""
        return replace(read_owner(path, path.read_bytes()), beat=self.beat) == self

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; only meaningful on its own host."""
        if self.boot != boot_id():
            return True
        return not psutil.pid_exists(self.pid) or self.started != start_of(self.pid)

    @property
    def counts_elsewhere(self) -> bool:
        """Whether the process is on another machine and writes heartbeats."""
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
        UserError: another run holds it, or may hold it.
    """
    path = folder / LOCK_FILE
    try:
        # The page tells sessions apart by the last event before them, since clocks may be set.
        owner = replace(this_process(), after=after())
        while not create(path, owner.content) and not take_over(path, owner.content):
            pass  # released between the two calls
    except OSError as error:
        raise UserError(f"output_dir: {str(path)!r} cannot be written: {error.strerror}.") from None
    over = threading.Event()
    refreshing = threading.Thread(target=refresh, args=(path, owner, over), name="lock", daemon=True)
    refreshing.start()
    try:
        yield
    finally:
        over.set()
        refreshing.join(REFRESH_SECONDS)  # or the disk hangs
        with suppress(OSError, UserError):  # deleted, or damaged
            if owner.holds(path):
                path.unlink()


def refresh(path: Path, owner: Owner, over: threading.Event) -> None:
    """Write heartbeats until `over`; ends this process if another one has taken the lock, since it writes there now."""
    for beat in itertools.count(1):
        with suppress(OSError, UserError), path.open("r+b") as file:  # the next time, perhaps
            hold(file)
            if not owner.holds(path):
                winner = read_owner(path, file.read())
                print(f"{path} was taken over by {winner}, because this process was silent.", file=sys.stderr)
                # Not `sys.exit`, which would end this thread alone while training goes on writing.
                os._exit(1)
            file.seek(0)
            file.write(replace(owner, beat=f"{beat:08}").content)
        if over.wait(REFRESH_SECONDS):
            return


def create(path: Path, content: bytes, mode: int = 0o666) -> bool:
    """Create a file, such as the lock, with its content atomically; False if there is one already."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "wb", opener=partial(os.open, mode=mode)) as file:
            file.write(content)
        try:
            os.link(draft, path)  # unlike a rename it fails if the name exists
        except FileExistsError:
            return False
        except OSError:  # a file system without links
            return create_in_place(path, content, mode)
    finally:
        draft.unlink(missing_ok=True)
    return True


def create_in_place(path: Path, content: bytes, mode: int = 0o666) -> bool:
    """Create a file, then write its content; a kill in between leaves a lock that the user must delete."""
    try:
        with open(path, "xb", opener=partial(os.open, mode=mode)) as file:
            try:
                file.write(content)
                file.flush()
            except OSError:  # a full disk: an empty lock would block every later start
                path.unlink()
                raise
    except FileExistsError:
        return False
    return True


def take_over(path: Path, content: bytes) -> bool:
    """Make this process the owner of a lock whose owner has ended; False if the lock has been removed meanwhile.

    Raises:
        UserError: the owner is alive, or on another machine where it cannot show that it is.
    """
    with suppress(FileNotFoundError):
        seen = path.read_bytes()
        owner = read_owner(path, seen)
        if owner.counts_elsewhere:
            refuse_if_it_counts(path, seen)
        else:
            refuse_if_in_use(path, owner)
        with path.open("r+b") as file:
            hold(file)  # of several processes that find the same dead owner, one may take over
            if file.read() != seen:
                return False
            file.seek(0)
            file.truncate()
            file.write(content)
            file.flush()
            # Between reading and writing, the lock may have been deleted and made anew under the same name.
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                logger.info("Took over %s: %s has ended without removing it.", path, owner)
                return True
    return False


def refuse_if_it_counts(path: Path, seen: bytes) -> None:
    """Watch a lock for as long as a living owner on another machine could leave it as it is.

    Raises:
        UserError: it has changed.
    """
    owner = read_owner(path, seen)
    logger.info("%s belongs to %s. Waiting up to %g s for a heartbeat.", path, owner, ABANDONED_SECONDS)
    deadline = time.monotonic() + ABANDONED_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, ABANDONED_SECONDS / 10))
        if path.read_bytes() != seen:  # opened each time: network file systems then ask their server
            raise in_use(path, owner, "Wait for its end, or choose another output_dir.")


def refuse_if_in_use(path: Path, owner: Owner) -> None:
    """Raise unless the owner of a lock is known to have ended.

    Raises:
        UserError: the owner is alive, or on another machine.
    """
    if owner.host != socket.gethostname():
        advice = f"If it has ended, delete {path} and start again; otherwise choose another output_dir."
        raise in_use(path, owner, f"Whether that run is still going cannot be seen from this machine. {advice}")
    if not owner.is_gone:
        raise in_use(path, owner, "Wait for its end, stop it, or choose another output_dir.")


def in_use(path: Path, owner: Owner, advice: str) -> UserError:
    """The error for a folder that another run holds, or may hold."""
    return UserError(f"output_dir: {path.parent} is in use by {owner}. {advice}")


def read_owner(path: Path, content: bytes) -> Owner:
    """The owner of a lock according to its content.

    Raises:
        UserError: the content is not readable.
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
    """A process of this machine as the owner of something, from now on."""
    return Owner(pid, socket.gethostname(), boot_id(), start_of(pid), command, round(time.time(), 3))


def boot_id() -> str:
    """Identifies the current boot of this machine; empty if the system does not report it."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else ""


def start_of(pid: int) -> str:
    """When a process started, in ticks since boot; empty for zombies, and if the system does not report it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    # The 3rd and 22nd of proc(5); the 2nd, the program's name in brackets, may hold spaces.
    return "" if fields[0] == "Z" else fields[19]
