"""Who opens the page: the user at the other end of a connection within this machine; all others need a token.

Linux lists the sockets of a machine with their users. Forwarded ports belong to whoever forwards them: `ssh -L` to the
user who logged in, the relays of WSL and of most containers to root. Free of torch.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from simpletuner.errors import UserError
from simpletuner.run.lock import create

End = tuple[str, int]
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ROOT, NOBODY = 0, 65534  # a container sees every user that it does not know as nobody
VARIABLE = "SIMPLETUNER_PAGE_TOKEN"
TOKEN = re.compile(r"[\w.~-]{16,}", re.ASCII)


def is_own_user(client: End, server: End) -> bool:
    """Whether the client's end of a connection belongs to the user of this process, or to root; False if unknown."""
    user = socket_user(client, server)
    return user is not None and user in {ROOT, os.geteuid()} - {NOBODY}


def can_tell_users(listener: socket.socket) -> bool:
    """Whether the users of connections to a listening socket can be read here, tried with a connection to it."""
    end = listener.getsockname()[:2]
    with suppress(OSError), socket.create_connection(end, timeout=5) as own:
        return is_own_user(own.getsockname()[:2], end)
    return False


def socket_user(client: End, server: End) -> int | None:
    """The user of the socket that connects `client` to `server`; None if this machine lists no such socket."""
    local, remote = spellings(*client), spellings(*server)
    for table in TABLES:
        with suppress(OSError):  # another system, or one that hides the table
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                columns = line.split()
                # A socket that its process has closed is listed for a while, without an inode and as root's.
                if columns[1] in local and columns[2] in remote and columns[9] != "0":
                    return int(columns[7])
    return None


def spellings(host: str, port: int) -> set[str]:
    """An address as the tables write it: words of the machine's byte order in hex; IPv4 also inside IPv6."""
    address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    plain = (isinstance(address, IPv6Address) and address.ipv4_mapped) or address
    packed = [plain.packed, *([IPv6Address(f"::ffff:{plain}").packed] if isinstance(plain, IPv4Address) else [])]
    step = -1 if sys.byteorder == "little" else 1
    return {
        "".join(form[start : start + 4][::step].hex() for start in range(0, len(form), 4)).upper() + f":{port:04X}"
        for form in packed
    }


def page_token(file: Path | None) -> tuple[str, str]:
    """The token of this user's pages and where it is kept: the file, else the variable, else a file in the home folder.

    A file that does not exist is made, so the token and the cookies of browsers outlive a server.

    Raises:
        UserError: it is too short, others can read it, or it cannot be kept.
    """
    if file is None and VARIABLE in os.environ:
        token, source = os.environ[VARIABLE], VARIABLE
    else:
        token, source = _kept_token(file)
    if not TOKEN.fullmatch(token):
        raise UserError(f"{source} must hold a token of at least 16 letters, digits or any of . _ ~ -")
    return token, source


def _kept_token(file: Path | None) -> tuple[str, str]:
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = file or state / "simpletuner" / "page-token"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            # Another server may do so now: the first counts.
            create(path, secrets.token_urlsafe(32).encode(), mode=0o600)
        mode, text = path.stat().st_mode, path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        hint = f"name a file with --token-file, or set {VARIABLE}"
        raise UserError(f"the token of the page cannot be kept ({error}); {hint}.") from None
    if os.name == "posix" and mode & 0o077:
        raise UserError(f"others can read the token in {path} (mode {mode & 0o777:04o}): chmod 600 {path}")
    return text, str(path)
