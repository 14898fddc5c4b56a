"""The texts of the page in other languages.

English texts are the keys of `texts.json`, which has their translations; a text without one is said
in English. Values stand in named places, as in `{done} of {total}`. Nothing translates names,
messages of errors and the help of options.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Literal

from simpletuner.reporting.wording import about_amount

TEXTS = Path(__file__).parent / "texts.json"
ENGLISH = "en"
# The languages by their names, as the switch shows them.
NAMES: Mapping[str, str] = {
    ENGLISH: "English",
    "zh": "中文",
    "hi": "हिन्दी",
    "es": "Español",
}
NUMBER = re.compile(r"\d+$")
# Units of durations: the text for one, and for several.
UNITS: Mapping[str, tuple[str, str]] = {
    "s": ("{count} s", "{count} s"),
    "minutes": ("1 minute", "{count} minutes"),
    "hours": ("1 hour", "{count} hours"),
    "days": ("1 day", "{count} days"),
}

_language: ContextVar[str] = ContextVar("language", default=ENGLISH)


@contextmanager
def speaking(language: str) -> Iterator[None]:
    """Say texts in a language within a context; a command line is always in English."""
    token = _language.set(language)
    try:
        yield
    finally:
        _language.reset(token)


def spoken() -> str:
    """The code of the present language."""
    return _language.get()


def say(text: str, /, **values: object) -> str:
    """A text in the present language, with values in its named places."""
    said = _words(spoken()).get(text, text)
    return said.format(**values) if values else said


def say_counted(count: float, one: str, several: str, /, **values: object) -> str:
    """One of two texts, by the number that stands in its place `{count}`."""
    values.setdefault("count", f"{count:,}")
    return say(one if is_one(count) else several, **values)


def is_one(count: float) -> bool:
    """Whether a language has the singular for a number: Hindi also for zero.

    Chinese has one form: both texts have the same translation.
    """
    return count == 1 or (count == 0 and spoken() == "hi")


def say_label(label: str) -> str:
    """A label that may end in a number: `Rendering previews at step 100`."""
    number = NUMBER.search(label)
    if number is None:
        return say(label)
    text = f"{label[: number.start()]}{{step}}"
    return say(text, step=number[0]) if text in _words(spoken()) else label


def say_duration(seconds: float) -> str:
    """An estimated duration in words, as `about_text` has it in English."""
    amount, unit = about_amount(seconds)
    one, several = UNITS[unit]
    return say_counted(float(amount), one, several, count=amount)


def words_of_scripts(section: Literal["scripts", "start"]) -> Mapping[str, str]:
    """The texts that scripts say, in the present language; empty in English.

    Args:
        section: `start` for those of the place "New", which are sent with it.
    """
    return _column(section, spoken())


def choose_language(wanted: str, accepted: str) -> str:
    """The language of a request; English if none of the wanted ones is there.

    Args:
        wanted: the code that was chosen on the page; empty if none was.
        accepted: an `Accept-Language` header.
    """
    for wish in (wanted, *accepted.split(",")):
        tag = wish.partition(";")[0]  # without its weight, as in `de-CH;q=0.9`
        language = tag.partition("-")[0].strip().lower()
        if language in NAMES:
            return language
    return ENGLISH


@cache
def _tables() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """Translations by section, English text and language."""
    tables: dict[str, dict[str, dict[str, str]]] = json.loads(TEXTS.read_text(encoding="utf-8"))
    return tables


@cache
def _column(section: str, language: str) -> Mapping[str, str]:
    """The translations of a section into a language."""
    rows = _tables()[section].items()
    return {text: row[language] for text, row in rows if language in row}


@cache
def _words(language: str) -> Mapping[str, str]:
    """All translations into a language."""
    words: dict[str, str] = {}
    for section in _tables():
        words |= _column(section, language)
    return words
