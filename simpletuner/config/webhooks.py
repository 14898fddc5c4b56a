"""Webhooks: where the events of a run are sent. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field

from simpletuner.config.option import JSON_OR_FILE, Group, common, option, when
from simpletuner.config.values import Flag, Integer, Text, parse_flag, parse_objects
from simpletuner.errors import Problem
from simpletuner.redaction import REFERENCE

WEBHOOK_CONFIG = "webhook_config"
NO_VERIFY = "SIMPLETUNER_SSL_NO_VERIFY"
Level = Literal["critical", "error", "warning", "info", "debug"]


def parse_hooks(value: object) -> object:
    """The list of webhooks."""
    return parse_objects(WEBHOOK_CONFIG, value)


@dataclass(frozen=True)
class Hook:
    """One receiver of events."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    webhook_type: Literal["discord", "raw"]
    webhook_url: Text | None = None
    callback_url: Text | None = None
    message_prefix: Text | None = None
    log_level: Level = "info"
    auth_token: Text | None = None
    ssl_no_verify: Flag = False

    @property
    def address(self) -> str:
        """Where to send; empty if none is given. It is a secret."""
        own = self.callback_url if self.webhook_type == "raw" else None
        return own or self.webhook_url or ""

    @property
    def host(self) -> str:
        """The part of the address that may be shown."""
        return _host(self.address) or "?"

    @property
    def verifies(self) -> bool:
        """Whether the receiver's certificate is checked."""
        return not (self.ssl_no_verify or parse_flag(os.environ.get(NO_VERIFY) or False))

    def __str__(self) -> str:
        return f"{self.webhook_type} webhook at {self.host}, {self.log_level} and above"


class WebhookConfig(Group):
    """Webhooks"""

    requires = when(WEBHOOK_CONFIG)

    webhook_config: Annotated[list[Annotated[Hook, Field(title="webhook")]], BeforeValidator(parse_hooks)] | None = (
        common(
            None,
            "Where to send what happens in a run: an object with `webhook_type` (discord or raw) and `webhook_url` or "
            "`callback_url`, a list of them, or a file with either.",
            form=JSON_OR_FILE,
        )
    )
    webhook_reporting_interval: Integer = option(
        5, "Seconds between two messages about the training steps; the first and the last are always sent.", ge=1
    )
    webhook_images: Literal["data_uri", "base64"] = option(
        "data_uri", "How raw webhooks carry pictures: as data URIs, or as base64 alone. Clips are always data URIs."
    )

    @property
    def hooks(self) -> list[Hook]:
        return self.webhook_config or []


def check_webhooks(config: WebhookConfig) -> Iterator[Problem]:
    """Addresses that are missing or of another protocol. No message shows an address."""
    for index, hook in enumerate(config.hooks):
        where = f"{WEBHOOK_CONFIG}[{index}]"
        key = "webhook_url" if hook.webhook_type == "discord" else "callback_url"
        if not hook.address:
            yield Problem(f"{where}.{key}", f"is required for a {hook.webhook_type} webhook: its address.")
        elif not (_host(hook.address) or REFERENCE.search(hook.address)):
            yield Problem(f"{where}.{key}", "is no address of the form https://host/path or http://host/path.")
        elif hook.auth_token and not (hook.auth_token.isascii() and hook.auth_token.isprintable()):
            yield Problem(f"{where}.auth_token", "cannot be sent: a header is one line of ASCII letters.")
        elif not hook.verifies:
            message = f"the certificate of {hook.host} is not checked, so others could read what is sent there."
            yield Problem(where, message, fatal=False)


def _host(address: str) -> str:
    """The host of an HTTP address; empty if it is none."""
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - raises for an invalid one
    except ValueError:
        return ""
    is_usable = parts.scheme in ("http", "https") and address.isprintable() and " " not in address
    return (parts.hostname or "") if is_usable else ""
