"""One run at a time in an output folder.

The lock is a file that says who holds it. Whoever finds one whose process is gone takes it over; one of another
machine is never judged from here.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import TypeAdapter, ValidationError

from simpletuner.errors import UserError
from simpletuner.reporting.pace import clock

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock.

    Attributes:
        boot, started: which start of the machine and which moment after it the process belongs to, so that another
            process with its number is not taken for it; empty where the system does not tell.
        since: seconds since 1970.
    """

    pid: int
    host: str
    boot: str
    started: str
    command: str
    since: float

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; only known on its own host."""
        if self.boot != boot_id():
            return True
        return not is_alive(self.pid) or self.started != start_of(self.pid)

    def __str__(self) -> str:
        age = clock(max(0.0, time.time() - self.since))
        return f"process {self.pid} on {self.host} (`{self.command}`, started {age} ago)"


OWNER = TypeAdapter(Owner)


@contextmanager
def lock_output(folder: Path) -> Iterator[None]:
    """Hold a folder's lock while the block runs, also when it ends with an error.

    Raises:
        UserError: another run holds it, or may hold it.
    """
    path, owner = folder / LOCK_FILE, this_process()
    content = json.dumps(asdict(owner), indent=2).encode() + b"\n"
    try:
        while not create(path, content) and not take_over(path, content):
            pass  # it was released in between
    except OSError as error:
        raise UserError(f"output_dir: {str(path)!r} cannot be written: {error.strerror}.") from None
    try:
        yield
    finally:
        if path.is_file() and path.read_bytes() == content:
            path.unlink()


def create(path: Path, content: bytes) -> bool:
    """Write the lock with its content at once; False when there is one already."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_bytes(content)
    try:
        os.link(draft, path)  # fails where the name exists, and is never there half written
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        return create_in_place(path, content)
    finally:
        draft.unlink()
    return True


def create_in_place(path: Path, content: bytes) -> bool:
    """The same for a moment without content; a kill in it leaves a lock that the user must delete."""
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def take_over(path: Path, content: bytes) -> bool:
    """Write this process into a lock whose owner is gone; False when the lock has gone, too.

    Raises:
        UserError: the owner lives, or cannot be judged from here.
    """
    with suppress(FileNotFoundError), path.open("r+b") as file:
        hold(file)  # several that find the same dead owner come one after the other
        owner = read_owner(path, file.read())
        refuse_if_in_use(path, owner)
        file.seek(0)
        file.truncate()
        file.write(content)
        file.flush()
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            logger.info("Took over %s: %s has ended without removing it.", path, owner)
            return True
    return False


def refuse_if_in_use(path: Path, owner: Owner) -> None:
    """Stop unless the owner of a lock is known to be gone.

    Raises:
        UserError: the owner lives, or cannot be judged from here.
    """
    if owner.host != socket.gethostname():
        raise UserError(
            f"output_dir: {path.parent} is in use by {owner}. Whether that run is still going cannot be seen from "
            f"this machine. If it has ended, delete {path} and start again; otherwise choose another output_dir."
        )
    if not owner.is_gone:
        raise UserError(
            f"output_dir: {path.parent} is in use by {owner}. Wait for its end, stop it, or choose another output_dir."
        )


def read_owner(path: Path, content: bytes) -> Owner:
    """Who a lock says holds it.

    Raises:
        UserError: it says nothing that can be read.
    """
    try:
        return OWNER.validate_json(content)
    except ValidationError:
        message = f"output_dir: {path} does not say which run it belongs to. If there is none, delete it."
        raise UserError(message) from None


def hold(file: BinaryIO) -> None:
    """Keep other processes that ask for the same out of a file until it is closed, where the system can."""
    if sys.platform != "win32":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def this_process() -> Owner:
    """What a lock of this process says."""
    pid = os.getpid()
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return Owner(pid, socket.gethostname(), boot_id(), start_of(pid), command, round(time.time(), 3))


def boot_id() -> str:
    """Which start of this machine we are in; empty where the system does not tell."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else ""


def start_of(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty where the system does not tell, and for one that
    has ended and is not yet collected by its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    # The 3rd and 22nd of proc(5); the 2nd, the program's name in brackets, may hold spaces.
    return "" if fields[0] == "Z" else fields[19]


def is_alive(pid: int) -> bool:
    """Whether there is a process of that number on this machine; where that cannot be asked, there is."""
    if os.name != "posix":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's
    return True
