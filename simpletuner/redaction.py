"""Hides tokens, keys, passwords and webhook addresses in all output."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

HIDDEN = "[hidden]"

# Names of settings and environment variables that hold secrets. `token` must be a whole word, so
# that tokenizer_max_length and max_tokens stay readable.
SECRET_NAME = re.compile(
    r"(?:^|[_\-.])(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|authorization|credentials?)(?:$|[_\-.])"
    r"|(?:^|[_\-.])key$|webhook[_-]?url|callback[_-]?url",
    re.IGNORECASE,
)
# Shorter values ("1", "true", "none"), a bare "https://" and "--------" are not secrets, and hiding
# them would garble the log.
SHORTEST_SECRET = 8
FEWEST_CHARACTERS = 5
# A text being typed into a form is often a word that the page uses too: "training",
# "learning_rate".
LONGEST_WORD = 15
WORD = re.compile(r"[A-Z]?[a-z]+(?:[ _.-][a-z]+)*")

# Patterns of secrets anywhere in a text; the group `secret` is hidden. In order: Hugging Face,
# wandb, git hosts and OpenAI, AWS, user:password in an address, Discord, Slack, an Authorization
# header, its value alone, and settings with secret-like names.
SHAPES = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?P<secret>\bhf_[a-z0-9]{16,})",
        r"(?P<secret>\bwandb_v\d+_\w{16,})",
        r"(?P<secret>\b(?:gh[opsu]_|github_pat_|glpat-|sk-)[\w-]{16,})",
        r"(?P<secret>\bAKIA[0-9A-Z]{16}\b)",
        r"https?://(?P<secret>[^\s/@:]*:[^\s/@]+)@",
        r"https://(?:\w+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/(?P<secret>[\w/-]+)",
        r"https://hooks\.slack\.com/(?P<secret>[\w/-]+)",
        r"\bauthorization[\"']?\s*[:=]\s*[\"']?(?P<secret>(?:(?:bearer|basic|token)\s+)?[^\s\"',;]{4,})",
        r"\b(?:bearer|basic)\s+(?P<secret>[\w.~+/=-]{12,})",
        r"(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key)[\"']?\s*[:=]\s*[\"']?(?P<secret>[\w.~+/=-]{8,})",
        r"(?:webhook|callback)[_-]?url[\"']?\s*[:=]\s*[\"']?(?P<secret>[^\s\"',;]{8,})",
    )
)

# The name of a variable is not secret; its value is hidden when it is read.
REFERENCE = re.compile(r"\{env:[^}]*\}")

_known_secrets: set[str] = set()
_passing_secrets: ContextVar[set[str] | None] = ContextVar("_passing_secrets", default=None)


def hide(secret: str) -> None:
    """Hide this exact text from now on, for secrets that no pattern can recognise."""
    if not is_worth_hiding(secret):
        return
    passing = _passing_secrets.get()
    if passing is None:
        _known_secrets.add(secret)
    elif not is_word(secret):
        passing.add(secret)


@contextmanager
def hidden_for_now() -> Iterator[None]:
    """A context whose hidden texts are forgotten on exit.

    It hides no words: a text being typed may be one that the page itself contains.
    """
    before = _passing_secrets.set(set())
    try:
        yield
    finally:
        _passing_secrets.reset(before)


def is_worth_hiding(text: str) -> bool:
    """Whether a text can be a secret."""
    rest = re.sub(r"^https?://", "", text)
    return len(rest) >= SHORTEST_SECRET and len(set(rest)) >= FEWEST_CHARACTERS


def is_word(text: str) -> bool:
    """Whether a text looks like a word or a key."""
    return len(text) <= LONGEST_WORD and WORD.fullmatch(text) is not None


def hide_secrets(settings: Mapping[str, Any]) -> None:
    """Hide the values of nested settings with secret-like names, wherever they appear."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            hide_secrets(value)
        elif isinstance(value, list | tuple):
            hide_secrets({f"{key}.{number}": item for number, item in enumerate(value)})
        elif isinstance(value, str):
            is_secret = SECRET_NAME.search(str(key)) is not None
            if is_secret and not REFERENCE.search(value):
                hide(value)


def redact(text: str) -> str:
    """Replace every secret in a text by `[hidden]`.

    Secrets are texts passed to `hide`, values of environment variables with secret-like names
    (HF_TOKEN, WANDB_API_KEY), and text that matches a pattern (`Bearer …`, `api_key=…`, `hf_…`, a
    webhook address).
    """
    return _hide_in(text, _secrets())


def redact_texts(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested values with secrets hidden in texts."""
    return _redacted(values, _secrets(), by_name=False)


def redact_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested settings with secrets hidden in texts and under secret-like names."""
    return _redacted(settings, _secrets(), by_name=True)


def _redacted(values: Mapping[str, Any], secrets: list[str], *, by_name: bool) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return _redacted(value, secrets, by_name=by_name)
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        if isinstance(value, str):
            return _hide_in(value, secrets)
        return value

    redacted = {}
    for key, value in values.items():
        is_secret = by_name and bool(value) and SECRET_NAME.search(str(key)) is not None
        redacted[key] = HIDDEN if is_secret else clean(value)
    return redacted


def _hide_in(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    for shape in SHAPES:
        text = shape.sub(_hide_group, text)
    return text


def _secrets() -> list[str]:
    """All known secrets, longest first, since one may contain another."""
    secrets = set(_known_secrets)
    secrets |= _passing_secrets.get() or set()
    for name, value in os.environ.items():
        if SECRET_NAME.search(name) and is_worth_hiding(value):
            secrets.add(value)
    return sorted(secrets, key=len, reverse=True)


def _hide_group(match: re.Match[str]) -> str:
    """The text of a match, with its group `secret` hidden."""
    text = match.group()
    start, end = (position - match.start() for position in match.span("secret"))
    return text[:start] + HIDDEN + text[end:]
