"""The address of a server that writes captions, and whether pictures would leave this machine."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

from simpletuner.errors import UserError

KEY_VARIABLE = "CAPTION_API_KEY"
# The page suggests this address, and sends the key to no other.
ADDRESS_VARIABLE = "CAPTION_ADDRESS"
PATH = "/v1"  # of an address without a path
ENDPOINT = "/chat/completions"
EXAMPLES = "LM Studio: http://localhost:1234/v1, Ollama: http://localhost:11434/v1"


@dataclass(frozen=True)
class Address:
    """A server that speaks OpenAI's protocol.

    Attributes:
        url: its base, without a final slash; `/models` and `/chat/completions` are below it.
        host: its name or IP address.
    """

    url: str
    host: str

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine: `localhost`, or an address of the loopback interface.

        Other names may lead to other machines tomorrow, so they never count.
        """
        if self.host == "localhost":
            return True
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return False
        # 0.0.0.0 is what servers print; as a target it is this machine.
        return address.is_loopback or address.is_unspecified

    @property
    def described(self) -> str:
        """The host, with a warning if others on the network could read along."""
        is_readable = self.url.startswith("http:") and not self.is_local
        return f"{self.host}, without encryption" if is_readable else self.host

    def check_consent(self, *, may_send: bool, remedy: str) -> None:
        """Check that pictures may be sent to another machine.

        Raises:
            UserError: the user has not agreed; it ends with the remedy.
        """
        if self.is_local or may_send:
            return
        raise UserError(
            f"The pictures would be sent to {self.host}, which is not this machine. {remedy}"
        )


def read_address(text: str) -> Address:
    """Parse an address.

    Raises:
        UserError: it is not an address of a server.
    """
    text = text.strip()
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
        _ = parts.port  # raises for a port that is not a number
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise UserError(f"{text!r} is not an address of a captioning server ({EXAMPLES}).")
    if parts.username or parts.password:
        raise UserError(
            f"An address with a name and a password is not used; set the key as {KEY_VARIABLE} in "
            "the environment."
        )
    path = parts.path.rstrip("/").removesuffix(ENDPOINT) or PATH
    return Address(f"{parts.scheme}://{parts.netloc}{path}", host)


def api_key() -> str:
    """The key of the server, from the environment; empty if there is none.

    Raises:
        UserError: it cannot be a key.
    """
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not key.isascii() or not key.isprintable() or " " in key:
        raise UserError(f"{KEY_VARIABLE} holds characters that no key has.")
    return key


def is_trusted(address: Address) -> bool:
    """Whether whoever started the page's server named this address, so that it may get the key."""
    named = os.environ.get(ADDRESS_VARIABLE, "").strip()
    return bool(named) and read_address(named).url == address.url
