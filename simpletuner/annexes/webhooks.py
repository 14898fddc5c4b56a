"""Sends the events of a run to webhooks, with one thread per webhook, so that slow receivers do not
delay steps.

A message that cannot be delivered is dropped without a retry, and does not end the run.
"""

from __future__ import annotations

import base64
import functools
import io
import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from simpletuner.annexes.figures import still
from simpletuner.annexes.payloads import Payload, Payloads
from simpletuner.config.webhooks import Hook, WebhookConfig
from simpletuner.redaction import hide
from simpletuner.reporting.events import Event, EventStream
from simpletuner.reporting.metrics import MIME

logger = logging.getLogger(__name__)
# Cached, since reading the machine's certificates takes a tenth of a second.
tls_context = functools.cache(httpx.create_ssl_context)

TIMEOUT = 5.0  # seconds for a connection, and for a message
PATIENCE = (
    30.0  # seconds for a message that is never dropped, and for pending ones at the end of a run
)
WAITING = 64  # maximum number of messages in a queue
SECONDS_BETWEEN_WARNINGS = 60.0
LEVELS = {"critical": 0, "error": 1, "warning": 2, "success": 3, "info": 3, "debug": 4}
# Limits of Discord: characters of a message, and bytes of a file.
LONGEST_TEXT = 2000
LARGEST_FILE = 10_000_000
DISCORD_TYPES = {
    "training.status",
    "training.checkpoint",
    "training.validation",
    "notification",
    "error",
}


class Outbox:
    """A queue of pending messages, at most `WAITING`.

    A full queue drops the oldest progress message, or else the oldest message, but never one about
    a checkpoint, an error or the end of the run.

    Attributes:
        dropped: number of dropped messages.
    """

    def __init__(self) -> None:
        self._messages: deque[Payload] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Payload) -> None:
        """Add a message; never blocks."""
        with self._changed:
            self._messages.append(message)
            if len(self._messages) > WAITING:
                # `min` returns the first of equals, which is the oldest.
                victim = min(self._messages, key=_worth)
                if _worth(victim) < KEPT:
                    self._messages.remove(victim)
                    self.dropped += 1
            self._changed.notify()

    def take(self) -> Payload | None:
        """Wait for a message and return the oldest; None if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._closed)
            return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        """Close the queue; pending messages can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def hurry(self) -> None:
        """Drop all pending messages that may be dropped."""
        with self._changed:
            kept = deque(message for message in self._messages if _worth(message) == KEPT)
            self.dropped += len(self._messages) - len(kept)
            self._messages = kept


KEPT = 2


def _worth(message: Payload) -> int:
    """The priority of a message: 0 for progress, `KEPT` for messages that are never dropped, else
    1.
    """
    if message["type"] in ("training.checkpoint", "error"):
        return KEPT
    if message["type"] == "training.status":
        return 0 if message["data"]["status"] == "running" else KEPT
    return 0 if message["type"] in ("validation.image", "lifecycle.stage") else 1


@dataclass
class Delivery:
    """Subscriber that sends events to one webhook.

    Attributes:
        folder: the output folder, to which paths in payloads are relative.
    """

    hook: Hook
    payloads: Payloads
    folder: Path
    images: str = "data_uri"
    outbox: Outbox = field(default_factory=Outbox, init=False)
    _warned_at: float = field(default=-math.inf, init=False)
    _unreachable: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._tls = tls_context(verify=self.hook.verifies)
        # A daemon, so that a message in transit does not keep the process alive.
        self._thread = threading.Thread(
            target=self._run, name=f"webhook {self.hook.host}", daemon=True
        )
        self._thread.start()

    def __call__(self, event: Event) -> None:
        for payload in self.payloads(event):
            is_asked_for = LEVELS[payload["severity"]] <= LEVELS[self.hook.log_level]
            if is_asked_for and (self.hook.webhook_type == "raw" or is_for_people(payload)):
                self.outbox.put(payload)

    def close(self, deadline: float) -> None:
        """Close the queue and deliver pending messages until a deadline of `time.monotonic`."""
        self.outbox.close()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def finish(self, deadline: float) -> None:
        """Deliver the pending messages that are never dropped, until a deadline of
        `time.monotonic`.
        """
        self.outbox.hurry()
        self.close(deadline)
        lost = self.outbox.dropped + len(self.outbox)
        if lost:
            logger.warning(
                "The webhook at %s was too slow: %d messages were not sent.", self.hook.host, lost
            )

    def _run(self) -> None:
        token = {"X-API-Key": self.hook.auth_token} if self.hook.auth_token else {}
        with httpx.Client(verify=self._tls, headers=token) as client:
            while (payload := self.outbox.take()) is not None:
                try:
                    self._post(client, payload)
                except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
                    level = logging.DEBUG if self._unreachable else logging.WARNING
                    self._unreachable = True
                    cause = type(error).__name__
                    logger.log(
                        level, "The webhook at %s could not be reached: %s", self.hook.host, cause
                    )

    def _post(self, client: httpx.Client, payload: Payload) -> None:
        content = (
            discord_form(self.hook, payload, self.folder)
            if self.hook.webhook_type == "discord"
            else None
        )
        body = content or {"json": inlined(payload, self.folder, self.images)}
        patience = httpx.Timeout(PATIENCE if _worth(payload) == KEPT else TIMEOUT, connect=TIMEOUT)
        request = client.build_request("POST", self.hook.address, timeout=patience, **body)
        hide(str(request.url))  # libraries log it in this form
        response = client.send(request, stream=True)  # the body is not read
        response.close()
        if response.is_error:
            self._complain(logging.WARNING, f"returned status {response.status_code}.")
        # 303: the message is delivered, and a response can be fetched elsewhere. Other redirects
        # are not followed: the token must not be sent to another host.
        elif response.next_request is not None and response.status_code != 303:
            place = response.next_request.url.copy_with(
                path="/", query=None, fragment=None, userinfo=b""
            )
            moved = (
                f"returned status {response.status_code}: it redirects to {place}, where nothing "
                "is sent."
            )
            self._complain(logging.ERROR, f"{moved} Change webhook_config if that is right.")

    def _complain(self, level: int, message: str) -> None:
        if time.monotonic() - self._warned_at >= SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            logger.log(level, "The webhook at %s %s", self.hook.host, message)


def is_for_people(payload: Payload) -> bool:
    """Whether a payload is sent to Discord: not progress, and not a failure status, which an error
    repeats.
    """
    return payload["type"] in DISCORD_TYPES and payload.get("data", {}).get("status") not in (
        "running",
        "failed",
    )


def inlined(payload: Payload, folder: Path, images: str) -> Payload:
    """The payload with pictures and clips as data URIs, or pictures as base64; missing files are
    left out.
    """
    if not payload.get("images") and not payload.get("videos"):
        return payload
    pictures = [(MIME[Path(path).suffix], _encoded(folder / path)) for path in payload["images"]]
    clips = [(clip["mime_type"], _encoded(folder / clip["src"])) for clip in payload["videos"]]
    head = "data:{};base64,{}" if images == "data_uri" else "{1}"
    return {
        **payload,
        "images": [head.format(kind, data) for kind, data in pictures if data],
        "videos": [
            {"src": f"data:{kind};base64,{data}", "mime_type": kind} for kind, data in clips if data
        ],
    }


def _encoded(path: Path) -> str:
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return ""


def discord_form(hook: Hook, payload: Payload, folder: Path) -> dict[str, Any]:
    """The body of a Discord message as arguments of httpx: the text, with pictures and clips as
    files.
    """
    text = payload.get("message") or payload.get("title") or ""
    if payload["type"] == "training.validation":
        noun = "video" if payload["videos"] else "image"
        name = payload["data"]["name"]
        text = f"Validation {noun} for `{name}`\nValidation prompt: {payload['body']}"
    paths = [*payload.get("images", ()), *(clip["src"] for clip in payload.get("videos", ()))]
    files, notes = _attachments([folder / path for path in paths])
    text = "\n".join([f"`({hook.message_prefix})` {text}" if hook.message_prefix else text, *notes])
    # Discord rejects longer messages.
    text = text if len(text) <= LONGEST_TEXT else f"{text[: LONGEST_TEXT - 1]}…"
    # Discord prefers payload_json over `content`. Mentions are disabled: prompts may contain
    # @names.
    settings = json.dumps({"content": text, "allowed_mentions": {"parse": []}})
    fields = {"content": (None, text), "payload_json": (None, settings, "application/json")}
    return {"files": {**fields, **{f"file{number}": file for number, file in enumerate(files)}}}


def _attachments(paths: Sequence[Path]) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Names and contents of files, and notes about files that are too large to send."""
    files = []
    notes = []
    for path in filter(Path.is_file, paths):
        if path.stat().st_size <= LARGEST_FILE:
            files.append((path.name, path.read_bytes()))
            continue
        files.append((f"{path.stem}.jpg", still_jpeg(path)))
        notes.append(f"{path.name} is too large for Discord; this is a picture of it.")
    return files, notes


def still_jpeg(path: Path) -> bytes:
    """A picture, or the middle frame of a clip, as JPEG with sides of at most 1024 pixels."""
    picture = still(path)
    picture.thumbnail((1024, 1024))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


@contextmanager
def delivered(
    settings: WebhookConfig, project: str, folder: Path, events: EventStream, job_id: str
) -> Iterator[None]:
    """Send the events of a run to its webhooks; pending messages are delivered within `TIMEOUT` or
    `PATIENCE`.

    Args:
        project: the prefix of messages of webhooks that have none.
        folder: the output folder, to which the paths of previews are relative.
    """
    deliveries: list[Delivery] = []
    for hook in settings.hooks:
        payloads = Payloads(settings.webhook_reporting_interval, job_id)
        named = hook if hook.message_prefix is not None else replace(hook, message_prefix=project)
        deliveries.append(Delivery(named, payloads, folder, settings.webhook_images))
        events.subscribe(f"The webhook at {hook.host}", deliveries[-1])
    try:
        yield
    finally:
        # Deadlines are shared, so that the delays of slow receivers do not add up.
        now = time.monotonic()
        for delivery in deliveries:
            delivery.close(now + TIMEOUT)
        for delivery in deliveries:
            delivery.finish(now + PATIENCE)
