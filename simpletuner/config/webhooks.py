"""Keys of webhooks: the receivers of a run's events."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field

from simpletuner.config.option import JSON_OR_FILE, Group, common, option, when
from simpletuner.config.types import FALSE_WORDS, TRUE_WORDS, Flag, Integer, Text, parse_objects
from simpletuner.errors import Problems
from simpletuner.redaction import REFERENCE

WEBHOOK_CONFIG = "webhook_config"
NO_VERIFY = "SIMPLETUNER_SSL_NO_VERIFY"
Level = Literal["critical", "error", "warning", "info", "debug"]


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
        """The address, which is a secret; empty if unset."""
        # A raw webhook may have its address in either key.
        if self.webhook_type == "raw" and self.callback_url:
            return self.callback_url
        return self.webhook_url or ""

    @property
    def host(self) -> str:
        """The part of the address that may be shown."""
        return _host(self.address) or "?"

    @property
    def verifies(self) -> bool:
        """Whether the receiver's certificate is checked."""
        return not (self.ssl_no_verify or _no_verify() in TRUE_WORDS)

    def __str__(self) -> str:
        return f"{self.webhook_type} webhook at {self.host}, {self.log_level} and above"


parse_hooks = partial(parse_objects, WEBHOOK_CONFIG)
Hooks = Annotated[list[Annotated[Hook, Field(title="webhook")]], BeforeValidator(parse_hooks)]


class WebhookConfig(Group):
    """Webhooks"""

    requires = when(WEBHOOK_CONFIG)

    webhook_config: Hooks | None = common(None, form=JSON_OR_FILE)
    """Receivers of a run's events: an object with `webhook_type` (discord or raw) and `webhook_url`
    or `callback_url`, a list of objects, or a file with either."""
    webhook_reporting_interval: Integer = option(5, ge=1)
    """Minimum seconds between messages about steps; the first and last step are always sent."""
    webhook_images: Literal["data_uri", "base64"] = option("data_uri")
    """Encoding of pictures in raw webhooks: data URIs or base64. Clips are always data URIs."""

    @property
    def hooks(self) -> list[Hook]:
        return self.webhook_config or []


def check_webhooks(config: WebhookConfig, report: Problems) -> None:
    """Report missing and invalid addresses; messages never show an address."""
    if _no_verify() not in {"", *TRUE_WORDS, *FALSE_WORDS}:
        report.error(NO_VERIFY, f"{_no_verify()!r} is not true or false.")
    for index, hook in enumerate(config.hooks):
        _check_hook(hook, f"{WEBHOOK_CONFIG}[{index}]", report)


def _check_hook(hook: Hook, where: str, report: Problems) -> None:
    """Report the first fault of a receiver."""
    key = "webhook_url" if hook.webhook_type == "discord" else "callback_url"
    token = hook.auth_token or ""
    if not hook.address:
        message = f"is required for a {hook.webhook_type} webhook: its address."
        report.error(f"{where}.{key}", message)
    elif not _host(hook.address) and not REFERENCE.search(hook.address):
        report.error(f"{where}.{key}", "must be a URL such as https://host/path.")
    elif not token.isascii() or not token.isprintable():
        message = "cannot be sent: a header is one line of ASCII letters."
        report.error(f"{where}.auth_token", message)
    elif not hook.verifies:
        message = (
            f"the certificate of {hook.host} is not checked, so messages could be intercepted."
        )
        report.warn(where, message)


def _no_verify() -> str:
    """The environment variable that lets all webhooks accept any certificate."""
    return os.environ.get(NO_VERIFY, "").strip().lower()


def _host(address: str) -> str:
    """The host of an HTTP address; empty if the address is invalid."""
    try:
        parts = urlsplit(address)
        parts.port  # noqa: B018 - raises for an invalid port
    except ValueError:
        return ""
    is_usable = parts.scheme in ("http", "https") and address.isprintable() and " " not in address
    return (parts.hostname or "") if is_usable else ""
