"""A captioner behind an address: a server that speaks OpenAI's protocol.

/models: what it offers ─► /chat/completions: pictures and an instruction ─► a text
"""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Sequence
from typing import Any

import httpx
from PIL.Image import Image

from simpletuner.annexes.captions.address import Address
from simpletuner.annexes.captions.editing import content_of
from simpletuner.annexes.captions.server import CaptionClient, FileFailureError, ServerReply
from simpletuner.annexes.captions.wording import LENGTHS, Style
from simpletuner.annexes.captions.writing import Description, DescriptionRequest, FileRequest
from simpletuner.errors import UserError, did_you_mean, escape_controls

# Servers load a model when it is first asked for; a large one from a slow disk takes minutes.
SECONDS_TO_DESCRIBE = 180.0
MOST_FAILURES = 3  # in a row, after which it is the server, not the files
MOST_LISTED = 12  # models in a message
BUSY = frozenset({429, 503})
TRIES = 4  # for a busy server
SECONDS_BUSY = 5.0  # before the next try, if the server does not say
MOST_SECONDS_BUSY = 60.0
# Characters per token, at most, of a server that ignores max_tokens.
CHARACTERS_PER_TOKEN = 6
FRAME_STEP = 2  # every second frame of a clip is sent: small models read few pictures at once
JPEG_QUALITY = 90
ONLY = "Answer with the description alone, without an introduction."
OF_FRAMES = "These {} pictures are frames of one clip of {:.1f} seconds, in their order."
# What reasoning models write first.
THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
# Models that may not or cannot describe a picture say so in words, which must not be trained.
REFUSAL = re.compile(
    r"(i['’]?m (very |so )?sorry|i am sorry|sorry,|i apologi[sz]e|as an ai\b"
    r"|i(['’]m| am) (not able|unable)|i (cannot|can['’]t|can not|won['’]t) )",
    re.IGNORECASE,
)


class AddressCaptioner:
    """Describes pictures by a server, one file at a time.

    Args:
        asked: a name of a model; empty for the only one that the server offers.
        style: decides the length of captions.
        key: of the server; empty if it needs none.

    Attributes:
        model: the name that the server knows.

    Raises:
        UserError: the server cannot be used, or does not have the model.
    """

    batch = 1

    def __init__(self, address: Address, asked: str, style: Style, key: str = "") -> None:
        self.server = CaptionClient(address, key)
        self.url = address.url
        self.longest = CHARACTERS_PER_TOKEN * LENGTHS[style]
        # Parameters that some servers refuse; they are dropped then.
        self.parameters: dict[str, Any] = {"max_tokens": LENGTHS[style], "temperature": 0}
        self.failures = 0
        self.model = self._choose_model(asked)

    def __call__(self, requests: Sequence[FileRequest]) -> list[Description]:
        return [self._answer(request) for _, request in requests]

    def _answer(self, request: DescriptionRequest) -> Description:
        """The answer to a request; after some failures in a row, no further file is tried.

        Raises:
            UserError: the server cannot be used any more.
        """
        try:
            answer = self._describe(request)
        except FileFailureError as error:
            self.failures += 1
            if self.failures == MOST_FAILURES:
                raise UserError(
                    f"{self.url}: {MOST_FAILURES} files in a row were not captioned; of "
                    f"the last one, {error}."
                ) from error
            return Description("", problem=str(error))
        self.failures = 0
        return answer

    def _describe(self, request: DescriptionRequest) -> Description:
        """A caption, or the problem that the model refuses this file.

        Raises:
            FileFailureError: the file was not described.
            UserError: the server cannot be used.
        """
        reply = self._ask(content_of_message(request))
        choice = _first((reply.document or {}).get("choices"))
        message = choice.get("message")
        if not isinstance(message, dict):
            raise self.server.unknown(reply)
        finish = choice.get("finish_reason")
        raw = _text_of(message.get("content"))
        text = " ".join(THINKING.sub("", raw).split())
        if message.get("refusal") or finish == "content_filter" or REFUSAL.match(text):
            return Description("", problem="the model refuses to describe it")
        if not text and finish == "length":
            most = self.parameters.get("max_tokens")
            raise FileFailureError(
                f"the model used up its {most} tokens before the caption; choose one that does not "
                "reason first"
            )
        if not text:
            raise FileFailureError("the model returned an empty caption")
        try:
            content_of(text)
        except UserError as error:
            return Description("", problem=str(error))
        is_whole = finish != "length" and len(text) <= self.longest
        return Description(text[: self.longest], is_whole)

    def _ask(self, content: list[dict[str, Any]]) -> ServerReply:
        """The server's answer to a message, once it is not busy.

        Raises:
            FileFailureError, UserError: see `_describe`.
        """
        messages = [{"role": "user", "content": content}]
        for _ in range(TRIES):
            body = {"model": self.model, "messages": messages, **self.parameters}
            reply = self.server.send("POST", "/chat/completions", SECONDS_TO_DESCRIBE, body)
            if reply.status in BUSY:
                time.sleep(_pause_of(reply))
            elif not self._drops_parameter(reply):
                break
        self.server.check(reply)
        if reply.status >= httpx.codes.BAD_REQUEST:
            raise FileFailureError(f"the server answers {reply.described}")
        return reply

    def _drops_parameter(self, reply: ServerReply) -> bool:
        """Whether the server refused a parameter, which is not sent any more."""
        if reply.status != httpx.codes.BAD_REQUEST:
            return False
        refused = [name for name in self.parameters if name in reply.message]
        for name in refused:
            del self.parameters[name]
        return bool(refused)

    def _choose_model(self, asked: str) -> str:
        """The model to use.

        Raises:
            UserError: the server does not offer it, or offers several.
        """
        offered = self.server.models()
        if offered is None:
            if asked:
                return asked
            raise UserError(f"--model: {self.url} does not list its models, so name one.")
        if not offered:
            raise UserError(f"{self.url} offers no model; load one there.")
        # Ollama lists the tag that it adds itself.
        for name in (asked, f"{asked}:latest"):
            if name in offered:
                return name
        if not asked and len(offered) == 1:
            return offered[0]
        names = ", ".join(map(escape_controls, offered[:MOST_LISTED]))
        if len(offered) > MOST_LISTED:
            names += f" and {len(offered) - MOST_LISTED} more"
        if not asked:
            raise UserError(f"--model: choose a model of {self.url} that reads pictures: {names}.")
        raise UserError(
            f"--model: {self.url} does not offer {asked!r}. It offers {names}."
            f"{did_you_mean(asked, offered)}"
        )


def content_of_message(request: DescriptionRequest) -> list[dict[str, Any]]:
    """The parts of a message: pictures, then what to do with them."""
    frames = request.small_frames
    lines = [request.instruction, ONLY]
    if request.seconds is not None:
        frames = frames[::FRAME_STEP]
        lines.insert(0, OF_FRAMES.format(len(frames), request.seconds))
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": _data_uri(frame)}} for frame in frames
    ]
    return [*parts, {"type": "text", "text": " ".join(lines)}]


def _data_uri(picture: Image) -> str:
    file = io.BytesIO()
    picture.convert("RGB").save(file, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def _first(choices: Any) -> dict[str, Any]:
    """The first of the choices in an answer; empty if there is none."""
    if isinstance(choices, list) and choices and isinstance(choices[0], dict):
        return choices[0]
    return {}


def _text_of(content: Any) -> str:
    """The text of a message, which some servers split into parts."""
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return " ".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _pause_of(reply: ServerReply) -> float:
    """Seconds to wait for a busy server."""
    asked = reply.headers.get("retry-after", "")
    seconds = float(asked) if asked.isdecimal() else SECONDS_BUSY
    return min(seconds, MOST_SECONDS_BUSY)
