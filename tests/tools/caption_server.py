"""A captioning server on this machine that speaks OpenAI's protocol, well or badly."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

JSON = "application/json"


@dataclass(frozen=True)
class Reply:
    """What the server answers to one request; a text of a dict is sent as JSON."""

    content: Any
    status: int = 200
    kind: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def caption(text: str | None, finish: str = "stop", **message: Any) -> Reply:
    """An answer with a caption."""
    content = {"role": "assistant", "content": text, **message}
    return Reply({"choices": [{"message": content, "finish_reason": finish}]})


def error(status: int, text: str, **more: Any) -> Reply:
    """An answer that refuses a request, as OpenAI words it."""
    return Reply({"error": {"message": text}}, status, **more)


PAGE = Reply("<html>Welcome to my router</html>", kind="text/html; charset=utf-8")


@dataclass
class CaptionServer:
    """A running server.

    Attributes:
        models: the answer to a request for its models.
        captions: answers to pictures; the last one is repeated.
        asked: the bodies of requests for captions.
        keys: the Authorization headers of all requests.
    """

    address: str
    models: Reply
    captions: list[Reply] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def pictures(self, number: int) -> list[Image.Image]:
        """The pictures of a request for a caption."""
        parts = self.asked[number]["messages"][0]["content"]
        uris = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        files = [base64.b64decode(uri.partition("base64,")[2]) for uri in uris]
        return [Image.open(io.BytesIO(file)) for file in files]

    def instruction(self, number: int) -> str:
        """The words of a request for a caption."""
        parts = self.asked[number]["messages"][0]["content"]
        return str(parts[-1]["text"])


@contextmanager
def serve_captions(*names: str) -> Iterator[CaptionServer]:
    """A server with models of these names."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.keys.append(self.headers["Authorization"])
            self.send(server.models if self.path == "/v1/models" else error(404, "no such path"))

        def do_POST(self) -> None:
            server.keys.append(self.headers["Authorization"])
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.asked.append(json.loads(body))
            self.send(server.captions[0])
            if len(server.captions) > 1:
                server.captions.pop(0)

        def send(self, reply: Reply) -> None:
            time.sleep(reply.seconds)
            text = reply.content if isinstance(reply.content, str) else json.dumps(reply.content)
            body = text.encode()
            self.send_response(reply.status)
            headers = {"Content-Type": reply.kind, "Content-Length": str(len(body))}
            for name, value in {**headers, **reply.headers}.items():
                self.send_header(name, value)
            with suppress(ConnectionError):  # the client may have given up
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the test's output clean."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.block_on_close = False  # a handler may still sleep
    models = Reply({"object": "list", "data": [{"id": name} for name in names]})
    server = CaptionServer(f"http://127.0.0.1:{http.server_port}/v1", models, [caption("a cat")])
    thread = threading.Thread(
        target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
