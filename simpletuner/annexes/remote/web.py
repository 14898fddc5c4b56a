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
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
PAGES = frozenset(
    {"text/html", "application/json", "application/xml", "text/xml"}
)  # formats of error pages
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
    transport = None if allow_private else _PublicTransport(verify=certificates)
    try:
        # `trust_env` enables the environment's proxy, which resolves names itself and would bypass
        # the check.
        client = httpx.Client(
            transport=transport, verify=certificates, trust_env=allow_private, follow_redirects=True
        )
        with client, client.stream("GET", url, headers=HEADERS, timeout=SECONDS) as response:
            yield from _chunks(response, most)
    except httpx.UnsupportedProtocol as error:  # also after a redirect
        raise DownloadError("does not lead to http or https") from error
    except (httpx.InvalidURL, UnicodeError) as error:
        raise DownloadError(f"is not an address: {error}") from error
    except (httpx.HTTPError, OSError) as error:
        raise UnreachableError(
            f"cannot be reached: {str(error) or type(error).__name__}"
        ) from error


def _chunks(response: httpx.Response, most: int) -> Iterator[bytes]:
    if not response.is_success:
        kind = UnreachableError if response.status_code in TEMPORARY else DownloadError
        raise kind(f"returned HTTP {response.status_code} {response.reason_phrase}")
    content = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content in PAGES:
        raise DownloadError(f"is {content}, not a picture or clip")
    announced = int(response.headers.get("Content-Length") or 0)
    until = time.monotonic() + MOST_SECONDS
    received = 0
    try:
        # Content-Length may be missing or wrong, so received bytes are counted too.
        for chunk in response.iter_raw() if announced <= most else ():
            received += len(chunk)
            if received > most:
                break
            yield chunk
            if time.monotonic() > until:
                raise UnreachableError(f"took more than {MOST_SECONDS / 60:g} minutes")
    except httpx.RemoteProtocolError as error:
        raise UnreachableError(f"ended after {received:,} of {announced:,} bytes") from error
    if max(received, announced) > most:
        raise DownloadError(f"has more than {most >> 20} MB")


class _PublicTransport(httpx.HTTPTransport):
    """Connects only to checked addresses; certificates are verified against the host name."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        failure: Exception = OSError(f"{request.url.host} has no address")
        extensions = {**request.extensions, "sni_hostname": request.url.host}
        for address in public_addresses(request.url.host):
            url = request.url.copy_with(host=address)
            sent = httpx.Request(
                request.method, url, headers=request.headers, extensions=extensions
            )
            try:
                return super().handle_request(sent)
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
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner:
            return is_public(inner)
    # Python counts some multicast addresses as global.
    return address.is_global and not address.is_multicast
