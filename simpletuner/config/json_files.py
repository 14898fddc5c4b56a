"""JSON as people write it: trailing commas are accepted, everything else is reported with its position."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from simpletuner.errors import Problem, Problems, Reading
from simpletuner.redaction import SECRET_NAME, hide

# A comma before a closing bracket, and every string (so that commas inside strings are left alone).
TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')
ENVIRONMENT_REFERENCE = re.compile(r"\{env:([^}]*)\}")
UNSET = "needs the environment variable {}, which is not set"
DEEPEST_NESTING = 100  # levels; far below the 1000 frames that Python allows functions which recurse into a value
Pairs = list[tuple[str, Any]]


class UnusableJsonError(ValueError):
    """Valid JSON with a value that cannot be used."""


def read_json(path: Path, kind: type = object, needed: str = "") -> Reading[Any]:
    """The JSON value in a file, or None after a problem with file, line and column.

    A comma before a closing bracket is accepted with a warning, since published examples contain one. A key that occurs
    twice in an object with different values is a problem; the last value is returned so that the rest can be checked.

    Args:
        kind, needed: what the value must be, and how a message calls it.
    """
    text = yield from read_text(path)
    if text is None:
        return None
    # A blank in place of the comma keeps lines and columns of error messages right.
    repaired = TRAILING_COMMA.sub(lambda match: match.group(1) or " ", text)
    if repaired != text:
        line = 1 + text.count("\n", 0, next(i for i, old in enumerate(text) if repaired[i] != old))
        message = f"has a comma before a closing bracket (line {line}); it was ignored."
        yield Problem(str(path), message, fatal=False)

    twice = Problems()

    # `dict` would keep the last value, too, but without a word.
    def keep_last(pairs: Pairs) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result and not same_value(result[key], value):
                twice.append(Problem(str(path), f"contains {key!r} twice: {result[key]!r} and {value!r}."))
            result[key] = value
        return result

    try:
        value = parse_json(repaired, keep_last)
        yield from twice
    except json.JSONDecodeError as error:
        fault = f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
    except UnusableJsonError as error:
        fault = str(error)
    else:
        if isinstance(value, kind):
            return value
        fault = f"must hold {needed}, not {json_kind(value)}"
    yield Problem(str(path), f"{fault}.")
    return None


def read_text(path: Path) -> Reading[str | None]:
    """A UTF-8 file as text, or None after a problem."""
    try:
        # -sig: editors on Windows begin a file with a byte order mark, which json refuses.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        yield Problem(str(path), f"is not UTF-8 text (byte {error.start}).")
    except OSError as error:
        yield Problem(str(path), f"cannot be read: {error.strerror}.")
    return None


def parse_json(text: str, object_of: Callable[[Pairs], Any] = dict) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: it is not JSON.
        UnusableJsonError: numbers with thousands of digits, very deep nesting, or invalid characters.
    """
    try:
        value = json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError:  # a ValueError, which the last branch would take for the other kind
        raise
    except RecursionError:
        raise UnusableJsonError("is nested too deeply") from None
    except ValueError:
        # int() refuses more than 4300 digits.
        raise UnusableJsonError("contains a number with thousands of digits") from None
    _check_usable(value)
    return value


def expand_environment(value: Any, where: str, *, secret: bool = False, keep_unset: bool = False) -> Reading[Any]:
    """Replace `{env:NAME}` in strings, inside lists and objects too; an unset variable is a problem.

    Args:
        secret: hide the variables' values in all output. Variables whose names look like secrets are always hidden.
        keep_unset: leave unset variables as they are, for `check_unset`.
    """
    unset = Problems()

    def lookup(match: re.Match[str]) -> str:
        name = match.group(1)
        if secret or SECRET_NAME.search(name):
            # Before the value can be part of a message or a log line.
            hide(os.environ.get(name, ""))
        if name not in os.environ:
            if keep_unset:
                return match.group()
            unset.append(Problem(where, f"{match.string!r} {UNSET.format(name)}."))
        return os.environ.get(name, "")

    def expand(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: expand(item) for key, item in part.items()}
        if isinstance(part, list):
            return [*map(expand, part)]
        return ENVIRONMENT_REFERENCE.sub(lookup, part) if isinstance(part, str) else part

    expanded = expand(value)
    yield from unset
    return expanded


def check_unset(settings: Iterable[tuple[str, Any]], *, fatal: bool) -> Iterator[Problem]:
    """Unset variables in settings that only sending needs: fatal where something is to be sent."""
    for key, value in settings:
        for name in dict.fromkeys(ENVIRONMENT_REFERENCE.findall(repr(value))):
            yield Problem(key, f"{UNSET.format(name)}{'' if fatal else '; training will need it'}.", fatal=fatal)


def same_value(one: Any, other: Any) -> bool:
    """Whether two spellings mean the same: 20 and "20", true and "True", 1e-4 and 0.0001."""
    if one == other:
        return True
    if isinstance(one, dict | list) or isinstance(other, dict | list):
        return False
    texts = str(one).strip().lower(), str(other).strip().lower()
    try:
        return texts[0] == texts[1] or float(texts[0]) == float(texts[1])
    except ValueError:
        return False


def json_kind(value: Any) -> str:
    """The name of a value's JSON type, with its article."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
    return kinds.get(type(value), "a number")


def _check_usable(value: Any) -> None:
    """Refuse what would fail later: NUL characters or lone surrogates in a text, and deep nesting."""
    # A list of what is left, since recursion could fail on the depth that it is to measure.
    waiting = [(value, 1)]
    while waiting:
        inner, depth = waiting.pop()
        if depth > DEEPEST_NESTING:
            raise UnusableJsonError("is nested too deeply")
        if isinstance(inner, dict):
            waiting += [(part, depth + 1) for pair in inner.items() for part in pair]
        elif isinstance(inner, list):
            waiting += [(part, depth + 1) for part in inner]
        # JSON can spell half of a UTF-16 pair, which cannot be written as UTF-8, and NUL, which no path can hold.
        elif isinstance(inner, str) and ("\0" in inner or any("\ud800" <= letter <= "\udfff" for letter in inner)):
            raise UnusableJsonError(f"contains an invalid character, in {inner!a:.80}")
