"""Downloads by http(s) from addresses that others wrote.

A shared table could name addresses of this machine's own network. Each host is resolved once, every answer is checked,
and the connection goes to a checked one, so neither a redirect nor a second answer of the DNS leads elsewhere.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.request import HTTPHandler, HTTPSHandler, ProxyHandler

from simpletuner.annexes.remote.store import CHUNK, DownloadError, UnreachableError

SECONDS = 30.0  # without an answer
MOST_SECONDS = 600.0  # for a whole file: some servers send a byte now and then
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
PAGES = frozenset({"text/html", "application/json", "application/xml", "text/xml"})  # what errors are shown as
HEADERS = {"User-Agent": "simpletuner", "Accept": "image/*, video/*, */*;q=0.1"}
NAT64 = ipaddress.ip_network("64:ff9b::/96")
HANDLERS: tuple[type[urllib.request.BaseHandler], ...] = (
    urllib.request.UnknownHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
)
PRIVATE = "which is not a public address"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def read_url(url: str, most: int, *, allow_private: bool = False) -> Iterator[bytes]:
    """The content of an address in chunks, the first with the file's head.

    Args:
        most: bytes; a larger file is refused.
        allow_private: also from private, loopback and link-local addresses, and through the environment's proxy.

    Raises:
        DownloadError: it cannot be had; UnreachableError if another try may help.
    """
    try:
        request = urllib.request.Request(url, headers=HEADERS)
        with closing(_opener(allow_private).open(request, timeout=SECONDS)) as response:
            yield from _chunks(response, most)
    except urllib.error.HTTPError as error:
        kind = UnreachableError if error.code in TEMPORARY else DownloadError
        raise kind(f"is answered with HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if "unknown url type" in str(reason):  # where a redirect leads, too
            raise DownloadError("does not lead to http or https") from error
        raise UnreachableError(f"cannot be reached: {reason or type(reason).__name__}") from error
    except ValueError as error:
        raise DownloadError(f"is not an address: {error}") from error


def _chunks(response: Any, most: int) -> Iterator[bytes]:
    kind = response.headers.get_content_type()
    if kind in PAGES:
        raise DownloadError(f"is {kind}, not a picture or clip")
    announced = int(response.headers.get("Content-Length") or 0)
    until, received = time.monotonic() + MOST_SECONDS, 0
    # The announced length may be missing or wrong, so both count.
    while received <= most and announced <= most and (chunk := response.read(CHUNK)):
        received += len(chunk)
        yield chunk
        if time.monotonic() > until:
            raise UnreachableError(f"takes more than {MOST_SECONDS / 60:g} minutes")
    if max(received, announced) > most:
        raise DownloadError(f"has more than {most >> 20} MB")
    if received < announced:
        raise UnreachableError(f"ends after {received:,} of {announced:,} bytes")


def _opener(allow_private: bool) -> urllib.request.OpenerDirector:
    """Opens http and https and nothing else; an opener of `build_opener` would read local files, too."""
    opener = urllib.request.OpenerDirector()
    # A proxy resolves names itself, which would evade the check.
    for kind in (*HANDLERS, *((ProxyHandler, HTTPHandler, HTTPSHandler) if allow_private else (_PublicHandler,))):
        opener.add_handler(kind())
    return opener


class _PublicHandler(HTTPHandler, HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_SecureConnection, req)


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = connect_publicly(self.host, self.port, self.timeout)


class _SecureConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        plain = connect_publicly(self.host, self.port, self.timeout)
        # The certificate is verified for the name, although the connection goes to an address.
        self.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=self.host)


def connect_publicly(host: str, port: int, timeout: float | None) -> socket.socket:
    """A connection to a host none of whose addresses is private.

    Raises:
        DownloadError: one of them is.
        OSError: there is no such host, or none of its addresses answers.
    """
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))
    # All are checked first: one private answer among public ones is enough for an attack.
    for address in addresses:
        if not is_public(ipaddress.ip_address(address)):
            raise DownloadError(f"leads to {address}, {PRIVATE}; allow_private_urls accepts such ones")
    failure: OSError | None = None
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout)
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host} has no address")


def is_public(address: Address) -> bool:
    """Whether an address is reachable from the whole internet, and so is the IPv4 address that it may embed."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner:
            return is_public(inner)
    # Python counts some multicast addresses as global.
    return address.is_global and not address.is_multicast
