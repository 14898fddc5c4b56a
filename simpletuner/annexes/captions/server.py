"""A server that speaks OpenAI's protocol: requests, answers, and what is wrong with them.

LM Studio, Ollama, vLLM, llama.cpp and hosted services speak it. Redirects are not followed: they
could lead the pictures to another machine.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx

from simpletuner.annexes.captions.address import EXAMPLES, KEY_VARIABLE, Address
from simpletuner.errors import UserError, escape_controls

SECONDS_TO_CONNECT = 10.0
SECONDS_TO_LIST = 10.0
MOST_BYTES = 1 << 20  # of an answer
LONGEST_MESSAGE = 200  # of the server


class FileFailureError(Exception):
    """A file was not described; others may be."""


@dataclass(frozen=True)
class ServerReply:
    """An answer of the server to one request."""

    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def is_page(self) -> bool:
        """Whether it is a web page."""
        return self.headers.get("content-type", "").lower().startswith("text/html")

    @property
    def document(self) -> dict[str, Any] | None:
        """The JSON object of the answer; None if it is something else."""
        try:
            document = json.loads(self.body)
        except ValueError:
            return None
        return document if isinstance(document, dict) else None

    @property
    def message(self) -> str:
        """The server's explanation of an error, on one line; empty if there is none."""
        document = self.document or {}
        error = document.get("error") or document.get("detail") or document.get("message") or ""
        if isinstance(error, dict):
            error = error.get("message") or ""
        text = " ".join(escape_controls(str(error)).split())
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[:LONGEST_MESSAGE]} …"
        return text

    @property
    def described(self) -> str:
        """The status with the server's explanation."""
        return f"HTTP {self.status}: {self.message}" if self.message else f"HTTP {self.status}"


class CaptionClient:
    """A client of a server.

    Args:
        key: of the server; empty if it needs none.
    """

    def __init__(self, address: Address, key: str) -> None:
        self.address = address
        self.client = httpx.Client(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # A proxy of the environment would carry pictures off this machine.
            trust_env=not address.is_local,
            follow_redirects=False,
        )

    def models(self) -> list[str] | None:
        """The names of the models that the server offers; None if it does not list them.

        Raises:
            UserError: the server cannot be used.
        """
        try:
            reply = self.send("GET", "/models", SECONDS_TO_LIST)
        except FileFailureError as error:
            raise UserError(f"{self.address.url}: {error}.") from error
        is_missing = reply.status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED)
        if is_missing and not reply.is_page:
            return None
        self.check(reply)
        rows = (reply.document or {}).get("data")
        if not isinstance(rows, list):
            raise self.unknown(reply)
        return [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]

    def send(
        self, method: str, path: str, seconds: float, body: dict[str, Any] | None = None
    ) -> ServerReply:
        """Send a request, and read at most `MOST_BYTES` within `seconds` in all.

        Raises:
            FileFailureError: no answer in time.
            UserError: the server cannot be reached.
        """
        timeout = httpx.Timeout(seconds, connect=SECONDS_TO_CONNECT)
        url = self.address.url + path
        end = time.monotonic() + seconds
        content = bytearray()
        try:
            with self.client.stream(method, url, json=body, timeout=timeout) as response:
                for chunk in response.iter_bytes():
                    content += chunk
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("")
                    if len(content) > MOST_BYTES:
                        raise FileFailureError(f"its answer is larger than {MOST_BYTES >> 20} MB")
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise FileFailureError(f"the server does not answer within {seconds:.0f} s") from error
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.DecodingError) as error:
            raise FileFailureError("the server ended the connection without an answer") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            reason = str(error) or f"no connection within {SECONDS_TO_CONNECT:.0f} s"
            raise UserError(
                f"{self.address.url} cannot be reached ({escape_controls(reason)}). Does the "
                "server run?"
            ) from error
        return ServerReply(response.status_code, response.headers, bytes(content))

    def check(self, reply: ServerReply) -> None:
        """Check that the server speaks the protocol, and lets us in.

        Raises:
            UserError: it does not, so no file can be captioned.
        """
        url = self.address.url
        if reply.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise UserError(
                f"{url} does not accept the key ({reply.described}); set it as {KEY_VARIABLE} in "
                "the environment."
            )
        if 300 <= reply.status < 400:
            target = escape_controls(reply.headers.get("location", ""))
            raise UserError(
                f"{url} redirects to {target!r}. Redirects are not followed; if you trust that "
                "server, give its address."
            )
        if reply.document is None:
            raise self.unknown(reply)
        if reply.status == httpx.codes.NOT_FOUND:
            raise UserError(f"{url}: {reply.described}.")

    def unknown(self, reply: ServerReply) -> UserError:
        """The error of a server that speaks another protocol."""
        what = "a web page" if reply.is_page else "something else"
        return UserError(
            f"{self.address.url} answers with {what} (HTTP {reply.status}), not as a captioning "
            f"server does. Its address often ends with /v1 ({EXAMPLES})."
        )
