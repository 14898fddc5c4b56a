"""Downloads by http(s) from addresses that others wrote.

A shared table could name addresses of this machine's own network. Each host is resolved once, every answer is checked,
and the connection goes to a checked one, so neither a redirect nor a second answer of the DNS leads elsewhere.
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

SECONDS = 30.0  # without an answer
MOST_SECONDS = 600.0  # for a whole file: some servers send a byte now and then
TEMPORARY = frozenset({408, 425, 429, 500, 502, 503, 504})
PAGES = frozenset({"text/html", "application/json", "application/xml", "text/xml"})  # what errors are shown as
# Compressed, a file would have another length than the one that is announced.
HEADERS = {"User-Agent": "simpletuner", "Accept": "image/*, video/*, */*;q=0.1", "Accept-Encoding": "identity"}
NAT64 = ipaddress.ip_network("64:ff9b::/96")
PRIVATE = "which is not a public address"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_certificates = functools.cache(ssl.create_default_context)  # of this machine: reading them takes a tenth of a second


def read_url(url: str, most: int, *, allow_private: bool = False) -> Iterator[bytes]:
    """The content of an address in chunks, as they arrive.

    Args:
        most: bytes; a larger file is refused.
        allow_private: also from private, loopback and link-local addresses, and through the environment's proxy.

    Raises:
        DownloadError: it cannot be downloaded; UnreachableError if another try may help.
    """
    certificates = _certificates()
    transport = None if allow_private else _PublicTransport(verify=certificates)
    try:
        # `trust_env` uses the environment's proxy, which resolves names itself and would evade the check.
        client = httpx.Client(transport=transport, verify=certificates, trust_env=allow_private, follow_redirects=True)
        with client, client.stream("GET", url, headers=HEADERS, timeout=SECONDS) as response:
            yield from _chunks(response, most)
    except httpx.UnsupportedProtocol as error:  # where a redirect leads, too
        raise DownloadError("does not lead to http or https") from error
    except (httpx.InvalidURL, UnicodeError) as error:
        raise DownloadError(f"is not an address: {error}") from error
    except (httpx.HTTPError, OSError) as error:
        raise UnreachableError(f"cannot be reached: {str(error) or type(error).__name__}") from error


def _chunks(response: httpx.Response, most: int) -> Iterator[bytes]:
    if not response.is_success:
        kind = UnreachableError if response.status_code in TEMPORARY else DownloadError
        raise kind(f"is answered with HTTP {response.status_code} {response.reason_phrase}")
    content = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content in PAGES:
        raise DownloadError(f"is {content}, not a picture or clip")
    announced = int(response.headers.get("Content-Length") or 0)
    until, received = time.monotonic() + MOST_SECONDS, 0
    try:
        # The announced length may be missing or wrong, so both count.
        for chunk in response.iter_raw() if announced <= most else ():
            received += len(chunk)
            if received > most:
                break
            yield chunk
            if time.monotonic() > until:
                raise UnreachableError(f"takes more than {MOST_SECONDS / 60:g} minutes")
    except httpx.RemoteProtocolError as error:
        raise UnreachableError(f"ends after {received:,} of {announced:,} bytes") from error
    if max(received, announced) > most:
        raise DownloadError(f"has more than {most >> 20} MB")


class _PublicTransport(httpx.HTTPTransport):
    """Connects to the addresses that were checked; certificates are verified for the name."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        failure: Exception = OSError(f"{request.url.host} has no address")
        extensions = {**request.extensions, "sni_hostname": request.url.host}
        for address in public_addresses(request.url.host):
            url = request.url.copy_with(host=address)
            try:
                return super().handle_request(
                    httpx.Request(request.method, url, headers=request.headers, extensions=extensions)
                )
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure


def public_addresses(host: str) -> list[str]:
    """The addresses of a host.

    Raises:
        DownloadError: one of them is private.
        OSError: there is no such host.
    """
    answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))
    # All are checked first: one private answer among public ones is enough for an attack.
    for address in addresses:
        if not is_public(ipaddress.ip_address(address)):
            raise DownloadError(f"leads to {address}, {PRIVATE}; allow_private_urls accepts such ones")
    return addresses


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
