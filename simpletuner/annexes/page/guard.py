"""Access control: the checks that every request passes before it is routed.

The page has no accounts: it is for the user who started it. On a loopback address, Linux reports
the user of a connection, since it lists sockets with their users. A forwarded port belongs to the
user who forwards it: the login user of `ssh -L`, root for the relays of WSL and of most containers.
Where the user is unknown, and on all other addresses, a request needs a token. A request must also
name this machine (`Host`, against DNS rebinding) and must not come from another site (`Origin`,
`Sec-Fetch-Site`). Bodies are JSON of limited size, or uploads; forms of other sites can send
neither content type.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from simpletuner.annexes.page.new.receive import LARGEST_FILE
from simpletuner.annexes.page.project import LARGEST_BODY, UPLOADS, Refusal, too_large
from simpletuner.annexes.page.runs.live import BUTTONS
from simpletuner.errors import UserError
from simpletuner.redaction import hidden_for_now

End = tuple[str, int]
SAFE = frozenset({"GET", "HEAD"})
OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; object-src 'none'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
# Defaults, which a route may override.
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# Key in a request's state: a function that returns whether the client is the user of this process.
OWN_USER = "is_own_user"
NEEDS_TOKEN = (
    "This page is for the user who started it. Open /?token=TOKEN with the token in {}; programs "
    "send it as X-API-Key."
)
# Not a redirect: browsers coming from another site would follow it without the new cookie.
WELCOME = '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=/"><title>simpletuner</title>'
# All sockets of the machine with their users, on Linux.
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ROOT = 0
NOBODY = 65534  # in a container, every user that is not mapped
VARIABLE = "SIMPLETUNER_PAGE_TOKEN"
# Unreserved characters, since the token is part of a URL.
TOKEN = re.compile(r"[\w.~-]{16,}", re.ASCII)


@dataclass(frozen=True)
class Access:
    """Who may use the page.

    Attributes:
        host: the address that the server listens on.
        token: required unless a connection is known to come from the server's user; None admits
            everyone.
        source: the file or variable that contains the token.
        in_run: the page belongs to a run: its buttons work, but it cannot edit files or start runs.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    source: str = ""
    in_run: bool = False

    def check(self, request: Request) -> None:
        """Check that a request is allowed.

        Raises:
            Refusal: 401, 403, 413 or 415.
        """
        host = request.headers.get("host", "")
        if not self.is_named(host):
            raise Refusal(403, f"This page is not {host!r}; open it as localhost or {self.host}.")
        if not self.admits(request):
            # Paths, which may contain the user's name, are not revealed to other machines.
            place = "the address that the server printed"
            if is_own(self.host):
                place = self.source
            raise Refusal(401, NEEDS_TOKEN.format(place))
        if is_foreign(request):
            raise Refusal(403, "The request comes from another site.")
        if request.method not in SAFE:
            self.check_change(request)

    def admits(self, request: Request) -> bool:
        """Whether a request has the token, or needs none."""
        if self.token is None or self.has_token(request):
            return True
        is_own_user = request.scope.get("state", {}).get(OWN_USER, lambda: False)
        return is_own(self.host) and is_own_user()

    def check_change(self, request: Request) -> None:
        """Check that a request that changes something is allowed.

        Raises:
            Refusal: 403, 413 or 415.
        """
        path = request.scope["path"]
        if self.in_run and path not in BUTTONS:
            raise Refusal(
                403,
                "This page belongs to a run; to edit files or start runs, use `simpletuner "
                "server`.",
            )
        allowed_type = "application/json"
        most = LARGEST_BODY
        if request.method == "PUT" and path.startswith(UPLOADS):
            allowed_type = "application/octet-stream"
            most = LARGEST_FILE
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != allowed_type:
            raise Refusal(415, f"The request must be sent as Content-Type: {allowed_type}.")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise too_large(most)

    def is_named(self, host_header: str) -> bool:
        """Whether a `Host` header names this server.

        A server that listens on all addresses has any name.
        """
        if is_everywhere(self.host):
            return True
        name = host_header.lower()
        if not name.endswith("]"):  # else an IPv6 address without a port
            name = name.rpartition(":")[0] or name
        own_host = self.host.lower()
        return name in OWN_NAMES or name in (own_host, f"[{own_host}]")

    def has_token(self, request: Request) -> bool:
        """Whether a request has the token, as a cookie, X-API-Key or bearer token."""
        key = request.headers.get("x-api-key", "")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        return any(self.is_token(text) for text in (key, bearer, *request.cookies.values()))

    def needs_token(self, listener: socket.socket) -> bool:
        """Whether even the server's own user needs the token."""
        return self.token is not None and not (is_own(self.host) and reports_users(listener))

    def is_token(self, text: str) -> bool:
        """Whether a text is the token, in constant time."""
        return self.token is not None and secrets.compare_digest(text.encode(), self.token.encode())

    def first_visit(self, request: Request) -> Response | None:
        """The response to the printed URL, which stores its token as a cookie; else None."""
        scope = request.scope
        token = request.query_params.get("token", "")
        if scope["path"] != "/" or not self.is_token(token):
            return None
        _, port = scope.get("server") or ("", 0)
        response = HTMLResponse(WELCOME)
        response.set_cookie(
            # Browsers send a cookie to all ports of a machine, so the name contains the port.
            f"simpletuner-{port}",
            token,
            httponly=True,
            samesite="strict",
            secure=scope["scheme"] == "https",
        )
        return response


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)  # startup and shutdown
        if scope["type"] != "http":
            return  # a web socket, which this page does not use

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        app: ASGIApp | None = self.access.first_visit(request)
        if app is None:
            try:
                self.access.check(request)
                app = self.app
            except Refusal as refusal:
                app = refusal.answer()
        # Secrets in a request are redacted only in its response.
        with hidden_for_now():
            await app(scope, receive, send_secured)


def is_foreign(request: Request) -> bool:
    """Whether another site made the browser send this request."""
    headers = request.headers
    if request.method in SAFE and headers.get("sec-fetch-dest") == "document":
        return False  # a link to the page, which other sites may have
    origin = headers.get("origin")
    host = headers.get("host", "").lower()
    if origin is not None and urlsplit(origin).netloc.lower() != host:
        return True
    return headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def is_everywhere(host: str) -> bool:
    """Whether an address means all addresses of the machine."""
    return host in ("0.0.0.0", "::", "")


def is_own(host: str) -> bool:
    """Whether only this machine can reach a server on this address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def is_own_user(client: End, server: End) -> bool:
    """Whether the client of a connection is the user of this process, or root; False if unknown."""
    user = socket_user(client, server)
    return user is not None and user in {ROOT, os.geteuid()} - {NOBODY}


def reports_users(listener: socket.socket) -> bool:
    """Whether the system reports the users of connections to a socket, tested by connecting."""
    end = listener.getsockname()[:2]
    with suppress(OSError), socket.create_connection(end, timeout=5) as probe:
        return is_own_user(probe.getsockname()[:2], end)
    return False


def socket_user(client: End, server: End) -> int | None:
    """The user id of the socket that connects `client` to `server`; None if it is not listed."""
    clients = spellings(*client)
    servers = spellings(*server)
    for table in TABLES:
        with suppress(OSError):  # not Linux, or the table is hidden
            for line in table.read_text(encoding="ascii").splitlines()[1:]:
                # The columns of proc(5), of which the first one numbers the sockets.
                _, local, remote, _, _, _, _, user, _, inode, *_ = line.split()
                # A closed socket is listed for a while, as root's and without an inode.
                if local in clients and remote in servers and inode != "0":
                    return int(user)
    return None


def spellings(host: str, port: int) -> set[str]:
    """An address as the tables may spell it; IPv4 also embedded in IPv6 (`::ffff:127.0.0.1`)."""
    address: IPv4Address | IPv6Address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    addresses = [address]
    if isinstance(address, IPv4Address):
        addresses.append(IPv6Address(f"::ffff:{address}"))
    return {f"{_native_hex(address.packed)}:{port:04X}" for address in addresses}


def _native_hex(packed: bytes) -> str:
    """Bytes of an address as upper-case hex; each word of 4 bytes in native byte order."""
    words = [packed[start : start + 4] for start in range(0, len(packed), 4)]
    if sys.byteorder == "little":
        words = [word[::-1] for word in words]
    return b"".join(words).hex().upper()


def page_token(file: Path | None) -> tuple[str, str]:
    """The token of this user's pages, and the file or variable that contains it.

    Without a file, the variable is read, then a file in the home folder. A missing file is
    created, so that the token and browsers' cookies outlive a server.

    Raises:
        UserError: the token is too short, readable by others, or cannot be stored.
    """
    if file is None and VARIABLE in os.environ:
        token = os.environ[VARIABLE]
        source = VARIABLE
    else:
        token, source = _stored_token(file)
    if not TOKEN.fullmatch(token):
        raise UserError(
            f"{source} must contain a token of at least 16 letters, digits or any of . _ ~ -"
        )
    return token, source


def _create(path: Path, token: str) -> None:
    """Create a file that only this user can read, unless another server creates it concurrently."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(draft, "w", opener=partial(os.open, mode=0o600)) as file:
            file.write(token)
        with suppress(FileExistsError):
            os.link(draft, path)  # unlike rename, fails if the name exists
    finally:
        draft.unlink(missing_ok=True)


def _stored_token(file: Path | None) -> tuple[str, str]:
    """The token in a file, which is created if it is missing; and the path of the file."""
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = file or state / "simpletuner" / "page-token"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create(path, secrets.token_urlsafe(32))
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        hint = f"name a file with --token-file, or set {VARIABLE}"
        raise UserError(f"the token of the page cannot be stored ({error}); {hint}.") from None
    if os.name == "posix" and mode & 0o077:
        raise UserError(
            f"other users can read the token in {path} (mode {mode & 0o777:04o}): chmod 600 {path}"
        )
    return text, str(path)
