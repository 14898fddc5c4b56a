"""The language of a request: the one chosen on the page, or else the browser's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from simpletuner.annexes.languages.say import choose_language, speaking

COOKIE = "language"  # language.js sets it


class Speaking:
    """Middleware that answers every request in its language; a program gets English."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        wanted = request.cookies.get(COOKIE, "")
        accepted = request.headers.get("accept-language", "")
        with speaking(choose_language(wanted, accepted)):
            await self.app(scope, receive, send)
