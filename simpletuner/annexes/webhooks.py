"""Sends the events of a run to webhooks.

Each webhook has a thread of its own, so that slow receivers do not delay steps. A message that
cannot be delivered is dropped without a retry, and does not end the run.
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
# Seconds for a message that is never dropped, and for pending ones at the end of a run.
PATIENCE = 30.0
MOST_WAITING = 64  # messages in a queue
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
    """A queue of pending messages, at most `MOST_WAITING`.

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
            if len(self._messages) > MOST_WAITING:
                # `min` returns the first of equals, which is the oldest.
                least = min(self._messages, key=_priority)
                if _priority(least) < KEPT:
                    self._messages.remove(least)
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
            kept = deque(message for message in self._messages if _priority(message) == KEPT)
            self.dropped += len(self._messages) - len(kept)
            self._messages = kept


# Priorities of messages: progress is dropped first, and some messages are never dropped.
PROGRESS = 0
NEWS = 1
KEPT = 2


def _priority(message: Payload) -> int:
    """The priority of a message."""
    match message["type"]:
        case "training.checkpoint" | "error":
            return KEPT
        case "training.status":
            return PROGRESS if message["data"]["status"] == "running" else KEPT
        case "validation.image" | "lifecycle.stage":
            return PROGRESS
        case _:
            return NEWS


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
            if LEVELS[payload["severity"]] > LEVELS[self.hook.log_level]:
                continue
            if self.hook.webhook_type == "raw" or is_for_people(payload):
                self.outbox.put(payload)

    def close(self, deadline: float) -> None:
        """Close the queue and deliver pending messages until a deadline of `time.monotonic`."""
        self.outbox.close()
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def finish(self, deadline: float) -> None:
        """Deliver pending messages that are never dropped, until a deadline of `time.monotonic`."""
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
        """Send a message, and warn of a response that does not accept it."""
        if self.hook.webhook_type == "discord":
            body = discord_form(self.hook, payload, self.folder)
        else:
            body = {"json": inlined(payload, self.folder, self.images)}
        seconds = PATIENCE if _priority(payload) == KEPT else TIMEOUT
        timeout = httpx.Timeout(seconds, connect=TIMEOUT)
        request = client.build_request("POST", self.hook.address, timeout=timeout, **body)
        hide(str(request.url))  # libraries log it in this form
        response = client.send(request, stream=True)  # the body is not read
        response.close()
        if response.is_error:
            self._warn(logging.WARNING, f"returned status {response.status_code}.")
        # 303: the message is delivered, and a response can be fetched elsewhere. Other redirects
        # are not followed: the token must not be sent to another host.
        elif response.next_request is not None and response.status_code != 303:
            host = response.next_request.url.copy_with(
                path="/", query=None, fragment=None, userinfo=b""
            )
            self._warn(
                logging.ERROR,
                f"returned status {response.status_code}: it redirects to {host}, where nothing "
                "is sent. Change webhook_config if that is right.",
            )

    def _warn(self, level: int, message: str) -> None:
        """Log a problem of the webhook, unless one was logged a short time ago."""
        if time.monotonic() - self._warned_at >= SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            logger.log(level, "The webhook at %s %s", self.hook.host, message)


def is_for_people(payload: Payload) -> bool:
    """Whether a payload is sent to Discord."""
    # Not progress, and not the status of a failure, which an error repeats.
    status = payload.get("data", {}).get("status")
    return payload["type"] in DISCORD_TYPES and status not in ("running", "failed")


def inlined(payload: Payload, folder: Path, images: str) -> Payload:
    """The payload with pictures and clips instead of their paths; missing files are left out.

    Args:
        images: `data_uri`, or `base64` for pictures without the prefix of a data URI.
    """
    if not payload.get("images") and not payload.get("videos"):
        return payload
    pictures = []
    for path in payload["images"]:
        content = _encoded(folder / path)
        if content:
            prefix = f"data:{MIME[Path(path).suffix]};base64," if images == "data_uri" else ""
            pictures.append(f"{prefix}{content}")
    clips = []
    for clip in payload["videos"]:
        content = _encoded(folder / clip["src"])
        if content:
            mime = clip["mime_type"]
            clips.append({"src": f"data:{mime};base64,{content}", "mime_type": mime})
    return {**payload, "images": pictures, "videos": clips}


def _encoded(path: Path) -> str:
    """The content of a file as base64; empty if it cannot be read."""
    try:
        return base64.b64encode(path.read_bytes()).decode()
    except OSError:
        return ""


def discord_form(hook: Hook, payload: Payload, folder: Path) -> dict[str, Any]:
    """The body of a Discord message as arguments of httpx: a text, with previews as files."""
    text = payload.get("message") or payload.get("title") or ""
    if payload["type"] == "training.validation":
        noun = "video" if payload["videos"] else "image"
        name = payload["data"]["name"]
        text = f"Validation {noun} for `{name}`\nValidation prompt: {payload['body']}"
    if hook.message_prefix:
        text = f"`({hook.message_prefix})` {text}"
    paths = [*payload.get("images", ()), *(clip["src"] for clip in payload.get("videos", ()))]
    attachments, notes = _attachments([folder / path for path in paths])
    text = "\n".join([text, *notes])
    if len(text) > LONGEST_TEXT:  # Discord rejects longer messages
        text = f"{text[: LONGEST_TEXT - 1]}…"
    # Mentions are disabled: prompts may contain @names.
    settings = json.dumps({"content": text, "allowed_mentions": {"parse": []}})
    form: dict[str, Any] = {
        "content": (None, text),
        "payload_json": (None, settings, "application/json"),  # Discord prefers it over `content`
    }
    for number, attachment in enumerate(attachments):
        form[f"file{number}"] = attachment
    return {"files": form}


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
    """Send the events of a run to its webhooks.

    At the end, pending messages are delivered within `TIMEOUT` or `PATIENCE`.

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
