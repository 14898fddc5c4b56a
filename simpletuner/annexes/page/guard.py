"""Who may use the page, and how much they may send: what every request passes before any route. Free of torch.

The page has no accounts: it is for the user who started it. On this machine's own address the system says whose a
connection is; where it does not, and on any other address, a request needs a token. It must also name this machine
(`Host`, against DNS rebinding) and not come from another site (`Origin`, `Sec-Fetch-Site`). Bodies are JSON, of limited
size, and must arrive in limited time.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from simpletuner.annexes.page.live import BUTTONS
from simpletuner.annexes.page.project import Refusal
from simpletuner.redaction import hidden_for_now

SAFE = frozenset({"GET", "HEAD"})
LARGEST_BODY = 2 * 2**20
BODY_SECONDS = 20.0  # a request has to be complete by then
OWN_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
# The page of a run has its buttons; it neither edits nor starts anything.
ALLOWED_IN_RUN = frozenset(f"/api/training{path}" for path in BUTTONS)
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; object-src 'none'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
# A route may set one of these itself.
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# In the state of a request: a function that tells whether the user of this process made its connection.
OWN_USER = "is_own_user"
NEEDS_TOKEN = (
    "This page is for the user who started it. Open /?token=TOKEN with the token in {}; programs send it as X-API-Key."
)
# Not a redirect: a browser that came from another site would follow one without the new cookie.
WELCOME = '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=/"><title>simpletuner</title>'


def nobody() -> bool:
    """The answer where a server does not know whose a connection is."""
    return False


@dataclass(frozen=True)
class Access:
    """Who may use the page.

    Attributes:
        host: the address that the server listens on.
        token: what everybody must know whose connection is not seen to be the server's own user's; None lets all in.
        source: the file or variable that holds the token.
        in_run: the page is part of a run.
    """

    host: str = "127.0.0.1"
    token: str | None = None
    source: str = ""
    in_run: bool = False

    def check(
        self, method: str, path: str, headers: Mapping[str, str], is_own_user: Callable[[], bool] = nobody
    ) -> None:
        """Raise unless a request may be answered.

        Args:
            is_own_user: whether the user of this process made the connection; on its own address that is enough.

        Raises:
            Refusal: 401, 403, 413 or 415.
        """
        if not self.knows(headers.get("host", "")):
            raise Refusal(403, f"This page is not {headers.get('host', '')!r}; open it as localhost or {self.host}.")
        if not (self.token is None or self.has_token(headers) or (is_own(self.host) and is_own_user())):
            # Strangers on the network need not know the user's name and folders.
            place = self.source if is_own(self.host) else "the address that the server printed"
            raise Refusal(401, NEEDS_TOKEN.format(place))
        if is_foreign(method, headers):
            raise Refusal(403, "The request comes from another site.")
        if method not in SAFE:
            self.check_change(path, headers)

    def check_change(self, path: str, headers: Mapping[str, str]) -> None:
        """Raise unless a request that changes something may be answered.

        Raises:
            Refusal: 403, 413 or 415.
        """
        if self.in_run and path not in ALLOWED_IN_RUN:
            raise Refusal(403, "This page belongs to a run; `simpletuner server` edits and starts.")
        if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refusal(415, "The request must be sent as Content-Type: application/json.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > LARGEST_BODY:
            raise too_large()

    def knows(self, host: str) -> bool:
        """Whether a `Host` header names this server; on all addresses at once it is not known by which name."""
        name = host.lower() if host.endswith("]") else host.lower().rpartition(":")[0] or host.lower()
        return name in OWN_NAMES | {self.host.lower(), f"[{self.host.lower()}]"} or is_everywhere(self.host)

    def has_token(self, headers: Mapping[str, str]) -> bool:
        """Whether a request brings the token as a cookie, X-API-Key or bearer token."""
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        return any(map(self.is_token, (headers.get("x-api-key", ""), bearer, *cookies(headers))))

    def is_token(self, text: str) -> bool:
        """Whether a text is the token, in constant time."""
        return self.token is not None and secrets.compare_digest(text.encode(), self.token.encode())


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # there are no web sockets

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        app: ASGIApp = self.first_visit(scope) or self.app
        if app is self.app:
            try:
                is_own_user = scope.get("state", {}).get(OWN_USER, nobody)
                self.access.check(scope["method"], scope["path"], Headers(scope=scope), is_own_user)
            except Refusal as refusal:
                app = refusal.answer()
        with hidden_for_now():
            await app(scope, limited(receive), send_secured)

    def first_visit(self, scope: Scope) -> Response | None:
        """The answer to the printed address, which keeps its token as a cookie; None for all others."""
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] != "/" or not self.access.is_token(given):
            return None
        response, secure = HTMLResponse(WELCOME), scope["scheme"] == "https"
        response.set_cookie(cookie_name(scope), given, httponly=True, samesite="strict", secure=secure)
        return response


def limited(receive: Receive) -> Receive:
    """`receive` that gives up on bodies that are too large, announced or not, or too slow."""
    size, complete, deadline = 0, False, asyncio.get_running_loop().time() + BODY_SECONDS

    async def receive_limited() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()  # the end of the connection
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise Refusal(408, f"The request took longer than {BODY_SECONDS:g} s to arrive.") from None
        size += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size > LARGEST_BODY:
            raise too_large()
        return message

    return receive_limited


def too_large() -> Refusal:
    """What a larger body is answered with."""
    return Refusal(413, f"The request is larger than {LARGEST_BODY // 2**20} MB.")


def is_foreign(method: str, headers: Mapping[str, str]) -> bool:
    """Whether another site makes a browser send this request; a link to the page is fine."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if method in SAFE and headers.get("sec-fetch-dest") == "document":
        return False
    same = origin is None or urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
    return not same or site not in ("same-origin", "none")


def cookies(headers: Mapping[str, str]) -> list[str]:
    """The values of the cookies that may hold a token; other servers on this machine have some, too."""
    found = cookie_parser(headers.get("cookie", ""))
    return [value for name, value in found.items() if name.startswith("simpletuner-")]


def cookie_name(scope: Scope) -> str:
    """The name of this server's cookie; browsers send cookies to all ports of a machine."""
    return f"simpletuner-{(scope.get('server') or ('', 0))[1]}"


def is_everywhere(host: str) -> bool:
    """Whether this means every address of the machine."""
    return host in ("0.0.0.0", "::", "")


def is_own(host: str) -> bool:
    """Whether only this machine can reach a server on this address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
