"""A web server on this machine, for tests of downloads."""

from __future__ import annotations

import io
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from PIL import Image


def picture(seed: int = 0, *, size: tuple[int, int] = (80, 64), kind: str = "PNG") -> bytes:
    """A small picture of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, (seed * 37 % 256, seed * 91 % 256, 128)).save(file, kind)
    return file.getvalue()


@dataclass
class Site:
    """What a server answers, and what was requested.

    Attributes:
        pages: content type and body by path.
        status: error codes by path; each request uses up one.
        moved: targets of redirects by path.
        announced: a wrong Content-Length by path.
        requests: number of requests by path.
    """

    address: str
    pages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    status: dict[str, list[int]] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    announced: dict[str, int] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)

    def add(self, path: str, body: bytes, kind: str = "image/png") -> str:
        """Serve a body; returns its address."""
        self.pages[path] = kind, body
        return self.address + path


@contextmanager
def serve(secure: ssl.SSLContext | None = None) -> Iterator[Site]:
    """A server on a free port of 127.0.0.1, by https with the certificate of `secure`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            site.requests[self.path] += 1
            codes = site.status.get(self.path, [])
            if codes:
                self.send_error(codes.pop(0))
            elif self.path in site.moved:
                self.send_response(302)
                self.send_header("Location", site.moved[self.path])
                self.end_headers()
            elif self.path in site.pages:
                kind, body = site.pages[self.path]
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(site.announced.get(self.path, len(body))))
                self.end_headers()
                self.wfile.write(body)
            else:
                self.send_error(404)

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if secure is not None:
        server.socket = secure.wrap_socket(server.socket, server_side=True)
    site = Site(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
