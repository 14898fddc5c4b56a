"""Reads files of text, JSON and TOML, and expands `{env:NAME}` in what they hold.

JSON may have trailing commas; every other fault is reported with its position.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from simpletuner.errors import Problem, Problems
from simpletuner.redaction import SECRET_NAME, hide

# A comma before a closing bracket, and every string (so that commas inside strings are left alone).
TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')
ENVIRONMENT_REFERENCE = re.compile(r"\{env:([^}]*)\}")
UNSET = "needs the environment variable {}, which is not set"
LARGEST_TEXT = 1 << 28  # bytes; the captions of 100,000 files take a fifth of this
# Levels. Functions that walk through settings need up to three of Python's 1000 frames per level.
DEEPEST_NESTING = 100
Pairs = list[tuple[str, Any]]
Stored = TypeVar("Stored")


def read_stored(path: Path, kind: type[Stored]) -> Stored | None:
    """The content of a JSON file of this program; None if missing, damaged or of another type."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def read_json(
    path: Path, report: Problems, kind: type | UnionType = object, needed: str = ""
) -> Any:
    """Read a JSON file; returns None after a problem, which has file, line and column.

    A comma before a closing bracket is accepted with a warning, since published examples contain
    some. A key that occurs twice in an object with different values is a problem; the last value is
    kept, so that checks continue.

    Args:
        kind, needed: required type of the value, and its name in messages.
    """
    text = read_text(path, report)
    if text is None:
        return None
    # A blank instead of the comma keeps line and column numbers in error messages correct.
    repaired = TRAILING_COMMA.sub(lambda match: match.group(1) or " ", text)
    notes = Problems()  # about what is left out below, if the rest can be read
    if repaired != text:
        line = _first_difference(text, repaired)
        message = f"has a comma before a closing bracket (line {line}); it was ignored."
        notes.warn(str(path), message)

    def keep_last(pairs: Pairs) -> dict[str, Any]:
        # `dict` would also keep the last value, but silently.
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result and not same_value(result[key], value):
                notes.error(str(path), f"contains {key!r} twice: {result[key]!r} and {value!r}.")
            result[key] = value
        return result

    try:
        value = parse_json(repaired, keep_last)
    except ValueError as error:
        report.error(str(path), f"{error}.")
        return None
    report.extend(notes)
    if not isinstance(value, kind):
        report.error(str(path), f"must hold {needed}, not {json_kind(value)}.")
        return None
    return value


def _first_difference(text: str, repaired: str) -> int:
    """The number of the first line in which two texts differ."""
    number = 1
    for line, repaired_line in zip(text.split("\n"), repaired.split("\n"), strict=True):
        if line != repaired_line:
            break
        number += 1
    return number


@contextmanager
def reported_under(key: str, path: Path, report: Problems) -> Iterator[Problems]:
    """A report on a file, whose problems are filed under the key that names the file."""
    of_file = Problems()
    yield of_file
    for problem in of_file:
        report.append(Problem(key, f"{str(path)!r} {problem.message}", problem.fatal))


def read_text(path: Path, report: Problems) -> str | None:
    """A UTF-8 file as text, or None after a problem."""
    try:
        fault = why_unreadable(path.stat(), LARGEST_TEXT)
        if fault:
            report.error(str(path), f"{fault}.")
            return None
        # -sig: Windows editors write a byte order mark, which json rejects.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        report.error(str(path), f"is not UTF-8 text (byte {error.start}).")
    except ValueError as error:
        report.error(str(path), f"cannot be read: {why_not_a_name(error)}.")
    except OSError as error:
        report.error(str(path), f"cannot be read: {error.strerror}.")
    return None


@cache
def read_toml(package: str, name: str) -> dict[str, Any]:
    """A file of data in a folder of the package."""
    return tomllib.loads((files(package) / name).read_text(encoding="utf-8"))


def why_unreadable(status: os.stat_result, most: int) -> str:
    """Why a file must not be read as a whole; empty if it may be."""
    # A pipe would block, and a device may never end.
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file but a folder, a pipe, a socket or a device"
    if status.st_size > most:
        return f"has {status.st_size:,} bytes; the limit is {most:,}"
    return ""


def why_not_a_name(error: ValueError) -> str:
    """Why no file can have a name; the words of Python differ between its versions."""
    if isinstance(error, UnicodeEncodeError):
        return "its name cannot be written as UTF-8"
    return "its name contains a null character"


def parse_json(text: str, object_of: Callable[[Pairs], Any] = dict) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or holds a value that cannot be used; the message continues the
            text's name.
    """
    try:
        value = json.loads(text, object_pairs_hook=object_of)
        # JSON can contain half of a UTF-16 pair, which no file can.
        json.dumps(value, ensure_ascii=False).encode()
        if _is_deep(value):
            raise RecursionError("nested too deeply")
    except json.JSONDecodeError as error:
        raise ValueError(json_fault(error)) from None
    except (ValueError, RecursionError) as error:
        # Deep nesting, or a number of more than 4300 digits.
        raise ValueError(f"cannot be used: {error}") from None
    return value


def _is_deep(value: Any) -> bool:
    """Whether a parsed value has more than `DEEPEST_NESTING` levels."""
    level = [value]
    for _ in range(DEEPEST_NESTING):
        next_level: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                next_level += part.values()
            elif isinstance(part, list):
                next_level += part
        level = next_level
    return bool(level)


# (pattern of the text at the error, part of Python's message, message for users); the first row
# whose both conditions hold counts.
JSON_FAULTS = (
    (r"//|/\*|#", "", "comments are not allowed"),
    (r"(True|False|None)\b", "", "true, false and null are written in lower case"),
    (r"'", "", "strings need double quotes"),
    (r"", "escape", "a backslash is written twice; paths may use / instead"),
    (r"", "control character", "a string must end on the line on which it begins"),
    (r"\Z", "", "it ends too early"),
    (r"", "',' delimiter", "a comma or a closing bracket is missing"),
    (r"", "':' delimiter", "a colon is missing"),
    # Since 3.13, Python complains of the comma itself, and before of what follows it.
    (r"", "trailing comma", "there is a comma too many"),
    (r"\}", "property name", "there is a comma too many"),
    (r"\]", "Expecting value", "there is a comma too many"),
    (r"", "property name", "a key in double quotes is missing"),
    (r"", "Expecting value", "a value is missing"),
)


def json_fault(error: json.JSONDecodeError) -> str:
    """Describe an error in hand-written JSON, with its position."""
    if not error.doc.strip():
        return "is empty"
    return f"is not valid JSON: {_cause_of(error)} (line {error.lineno}, column {error.colno})"


def _cause_of(error: json.JSONDecodeError) -> str:
    """What is wrong, in words for people who do not know JSON; else Python's message."""
    rest = error.doc[error.pos :]
    for pattern, words, cause in JSON_FAULTS:
        if words in error.msg and re.match(pattern, rest):
            return cause
    return error.msg


def expand_environment(
    value: Any, where: str, report: Problems, *, secret: bool = False, keep_unset: bool = False
) -> Any:
    """Replace `{env:NAME}` in strings, inside lists and objects too.

    Args:
        where: the key, for the problem of an unset variable.
        secret: hide the variables' values in all output. Variables whose names look like secrets
            are always hidden.
        keep_unset: leave references to unset variables for `check_unset`.
    """

    def look_up(match: re.Match[str]) -> str:
        name = match.group(1)
        text = os.environ.get(name)
        if text is not None:
            if secret or SECRET_NAME.search(name):
                hide(text)  # before it can reach a message or a log line
            return text
        if keep_unset:
            return match.group()
        report.error(where, f"{match.string!r} {UNSET.format(name)}.")
        return ""

    def expand(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: expand(item) for key, item in part.items()}
        if isinstance(part, list):
            return [expand(item) for item in part]
        if isinstance(part, str):
            return ENVIRONMENT_REFERENCE.sub(look_up, part)
        return part

    return expand(value)


def check_unset(settings: Iterable[tuple[str, Any]], report: Problems, *, fatal: bool) -> None:
    """Report unset variables in settings that are needed only for sending.

    Args:
        fatal: something will be sent.
    """
    for key, value in settings:
        for name in dict.fromkeys(ENVIRONMENT_REFERENCE.findall(repr(value))):
            if fatal:
                report.error(key, f"{UNSET.format(name)}.")
            else:
                report.warn(key, f"{UNSET.format(name)}; training will need it.")


def same_value(left: Any, right: Any) -> bool:
    """Whether two spellings mean the same: 20 and "20", true and "True", 1e-4 and 0.0001."""
    if left == right:
        return True
    if isinstance(left, dict | list) or isinstance(right, dict | list):
        return False
    left_text = str(left).strip().lower()
    right_text = str(right).strip().lower()
    if left_text == right_text:
        return True
    try:
        return float(left_text) == float(right_text)
    except ValueError:
        return False


def json_kind(value: Any) -> str:
    """The name of a value's JSON type, with an article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
    return kinds.get(type(value), "a number")
