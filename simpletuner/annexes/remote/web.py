"""Downloads from untrusted http(s) URLs, and refuses addresses of the local network.

A shared table could contain URLs of the local network. Every host is resolved once, all its
addresses are checked, and the connection goes to a checked address, so neither a redirect nor DNS
rebinding can reach another one.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator

import httpx

from simpletuner.annexes.remote.store import DownloadError, UnreachableError

SECONDS = 30.0  # timeout of a response
MOST_SECONDS = 600.0  # timeout of a whole file: some servers trickle bytes
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses
# Formats of error pages.
PAGES = frozenset({"text/html", "application/json", "application/xml", "text/xml"})
# Not compressed, so that the file's length equals Content-Length.
HEADERS = {
    "User-Agent": "simpletuner",
    "Accept": "image/*, video/*, */*;q=0.1",
    "Accept-Encoding": "identity",
}
NAT64 = ipaddress.ip_network("64:ff9b::/96")
PRIVATE = "which is not a public address"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Cached, since reading the machine's certificates takes a tenth of a second.
_certificates = functools.cache(ssl.create_default_context)


def read_url(url: str, most: int, *, allow_private: bool = False) -> Iterator[bytes]:
    """Stream the content of a URL in chunks.

    Args:
        most: maximum size in bytes; a larger file is refused.
        allow_private: allow private, loopback and link-local addresses, and the environment's
            proxy.

    Raises:
        DownloadError: the file cannot be downloaded.
        UnreachableError: the download failed, but a retry may help.
    """
    certificates = _certificates()
    try:
        client = httpx.Client(
            transport=None if allow_private else _PublicTransport(verify=certificates),
            verify=certificates,
            # The environment's proxy resolves names itself, and would bypass the check.
            trust_env=allow_private,
            follow_redirects=True,
        )
        with client, client.stream("GET", url, headers=HEADERS, timeout=SECONDS) as response:
            yield from _chunks(response, most)
    except httpx.UnsupportedProtocol as error:  # also after a redirect
        raise DownloadError("does not lead to http or https") from error
    except (httpx.InvalidURL, UnicodeError) as error:
        raise DownloadError(f"is not an address: {error}") from error
    except (httpx.HTTPError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise UnreachableError(f"cannot be reached: {reason}") from error


def _chunks(response: httpx.Response, most: int) -> Iterator[bytes]:
    """The content of a response in chunks; see `read_url`."""
    if not response.is_success:
        kind = UnreachableError if response.status_code in TEMPORARY else DownloadError
        raise kind(f"returned HTTP {response.status_code} {response.reason_phrase}")
    content_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type in PAGES:
        raise DownloadError(f"is {content_type}, not a picture or clip")
    too_large = f"has more than {most >> 20} MB"
    announced = int(response.headers.get("Content-Length") or 0)
    if announced > most:
        raise DownloadError(too_large)
    deadline = time.monotonic() + MOST_SECONDS
    received = 0
    try:
        for chunk in response.iter_raw():
            received += len(chunk)
            if received > most:  # Content-Length may be missing or wrong
                raise DownloadError(too_large)
            yield chunk
            if time.monotonic() > deadline:
                raise UnreachableError(f"took more than {MOST_SECONDS / 60:g} minutes")
    except httpx.RemoteProtocolError as error:
        raise UnreachableError(f"ended after {received:,} of {announced:,} bytes") from error


class _PublicTransport(httpx.HTTPTransport):
    """Connects only to checked addresses; certificates are verified against the host name."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        failure: Exception = OSError(f"{request.url.host} has no address")
        for address in public_addresses(request.url.host):
            to_address = httpx.Request(
                request.method,
                request.url.copy_with(host=address),
                headers=request.headers,
                extensions={**request.extensions, "sni_hostname": request.url.host},
            )
            try:
                return super().handle_request(to_address)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure


def public_addresses(host: str) -> list[str]:
    """Resolve a host to its public addresses.

    Raises:
        DownloadError: an address is private.
        OSError: the host cannot be resolved.
    """
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))
    # All addresses are checked first: a single private one is enough for an attack.
    for address in addresses:
        if not is_public(ipaddress.ip_address(address)):
            raise DownloadError(
                f"leads to {address}, {PRIVATE}; set allow_private_urls to accept it"
            )
    return addresses


def is_public(address: Address) -> bool:
    """Whether an address is globally reachable, including an embedded IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = _embedded_address(address)
        if embedded is not None:
            return is_public(embedded)
    # Python counts some multicast addresses as global.
    return address.is_global and not address.is_multicast


def _embedded_address(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 address leads to; None if it contains none."""
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)  # the last 32 bits
    if address.teredo is not None:
        _server, client = address.teredo
        return client
    return address.ipv4_mapped or address.sixtofour
