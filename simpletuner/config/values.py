"""Parses user input (JSON files, flags, numbers, texts, lists, sizes) and defines the types of options.

JSON may have trailing commas; every other fault is reported with its position.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

from simpletuner.errors import Problem, Problems, Reading, nearest, warning
from simpletuner.redaction import SECRET_NAME, hide, hide_secrets

# A comma before a closing bracket, and every string (so that commas inside strings are left alone).
TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')
ENVIRONMENT_REFERENCE = re.compile(r"\{env:([^}]*)\}")
UNSET = "needs the environment variable {}, which is not set"
LARGEST_TEXT = 1 << 28  # bytes; the captions of 100,000 files take a fifth of this
DEEPEST_NESTING = 100  # levels; functions that walk through settings need up to three of Python's 1000 frames a level
Pairs = list[tuple[str, Any]]
Stored = TypeVar("Stored")


def read_stored(path: Path, kind: type[Stored]) -> Stored | None:
    """The content of a JSON file written by this program; None if it is missing, damaged or of another type."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def read_json(path: Path, kind: type | UnionType = object, needed: str = "") -> Reading[Any]:
    """Read a JSON file; returns None after a problem, which has file, line and column.

    A comma before a closing bracket is accepted with a warning, since published examples contain some. A key that
    occurs twice in an object with different values is a problem; the last value is kept, so that checks continue.

    Args:
        kind, needed: required type of the value, and its name in messages.
    """
    text = yield from read_text(path)
    if text is None:
        return None
    # A blank instead of the comma keeps line and column numbers in error messages correct.
    notes, repaired = Problems(), TRAILING_COMMA.sub(lambda match: match.group(1) or " ", text)
    if repaired != text:
        line = 1 + text.count("\n", 0, next(i for i, old in enumerate(text) if repaired[i] != old))
        notes.append(warning(str(path), f"has a comma before a closing bracket (line {line}); it was ignored."))

    # `dict` would also keep the last value, but silently.
    def keep_last(pairs: Pairs) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result and not same_value(result[key], value):
                notes.append(Problem(str(path), f"contains {key!r} twice: {result[key]!r} and {value!r}."))
            result[key] = value
        return result

    try:
        value = parse_json(repaired, keep_last)
        yield from notes
    except ValueError as error:
        fault = str(error)
    else:
        if isinstance(value, kind):
            return value
        fault = f"must hold {needed}, not {json_kind(value)}"
    yield Problem(str(path), f"{fault}.")
    return None


def named_by(key: str, path: Path, reading: Reading[Stored]) -> Reading[Stored]:
    """A reading of a file, with its problems under the key that names the file."""
    problems = Problems()
    result = problems.take(reading)
    yield from (Problem(key, f"{str(path)!r} {each.message}", each.fatal) for each in problems)
    return result


def read_text(path: Path) -> Reading[str | None]:
    """A UTF-8 file as text, or None after a problem."""
    try:
        if fault := unfit_to_read(path.stat(), LARGEST_TEXT):
            yield Problem(str(path), f"{fault}.")
            return None
        # -sig: Windows editors write a byte order mark, which json rejects.
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        yield Problem(str(path), f"is not UTF-8 text (byte {error.start}).")
    except ValueError as error:  # NUL in the name
        yield Problem(str(path), f"cannot be read: {error}.")
    except OSError as error:
        yield Problem(str(path), f"cannot be read: {error.strerror}.")
    return None


@cache
def read_toml(package: str, name: str) -> dict[str, Any]:
    """A file of data in a folder of the package."""
    return tomllib.loads((files(package) / name).read_text(encoding="utf-8"))


def no_file(path: Path) -> str:
    """Why there is no file at a path, as the end of a sentence."""
    return "is a folder, not a file" if os.path.isdir(path) else "does not exist"  # noqa: PTH112 - never raises


def unfit_to_read(status: os.stat_result, most: int) -> str:
    """Why a file must not be read whole, or an empty text: a pipe would block, a device may never end."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file but a folder, a pipe, a socket or a device"
    return f"has {status.st_size:,} bytes; the limit is {most:,}" if status.st_size > most else ""


def parse_json(text: str, object_of: Callable[[Pairs], Any] = dict) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or holds what nothing could work with; the message continues the text's name.
    """
    try:
        value = json.loads(text, object_pairs_hook=object_of)
        # JSON can contain half of a UTF-16 pair, which no file can.
        json.dumps(value, ensure_ascii=False).encode()
        if _is_deep(value):
            raise RecursionError("nested too deeply")
    except json.JSONDecodeError as error:
        raise ValueError(json_fault(error)) from None
    except (ValueError, RecursionError) as error:  # deep nesting, or a number of more than 4300 digits
        raise ValueError(f"cannot be used: {error}") from None
    return value


def _is_deep(value: Any) -> bool:
    """Whether a parsed value has more than `DEEPEST_NESTING` levels."""
    level = [value]
    for _ in range(DEEPEST_NESTING):
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [*chain.from_iterable(inner)]
    return bool(level)


# (text at the error, part of Python's message, message for users)
JSON_FAULTS = (
    (r"//|/\*|#", "", "comments are not allowed"),
    (r"(True|False|None)\b", "", "true, false and null are written in lower case"),
    (r"'", "", "keys and texts need double quotes"),
    (r"", "escape", "a backslash is written twice; paths may use / instead"),
    (r"", "control character", "a text must end on the line on which it begins"),
    (r"\Z", "", "it ends too early"),
    (r"", "',' delimiter", "a comma or a closing bracket is missing"),
    (r"", "':' delimiter", "a colon is missing"),
    (r"", "property name", "a key in double quotes is missing"),
    (r"", "Expecting value", "a value is missing"),
)


def json_fault(error: json.JSONDecodeError) -> str:
    """Describe an error in hand-written JSON, with its position."""
    if not error.doc.strip():
        return "is empty"
    rest = error.doc[error.pos :]
    words = next((words for text, said, words in JSON_FAULTS if said in error.msg and re.match(text, rest)), error.msg)
    return f"is not valid JSON: {words} (line {error.lineno}, column {error.colno})"


def expand_environment(value: Any, where: str, *, secret: bool = False, keep_unset: bool = False) -> Reading[Any]:
    """Replace `{env:NAME}` in strings, inside lists and objects too; an unset variable is a problem.

    Args:
        secret: hide the variables' values in all output. Variables whose names look like secrets are always hidden.
        keep_unset: leave references to unset variables for `check_unset`.
    """
    unset = Problems()

    def lookup(match: re.Match[str]) -> str:
        name = match.group(1)
        if secret or SECRET_NAME.search(name):
            # Before the value can reach a message or a log line.
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
    """Report unset variables in settings that are needed only for sending; fatal if something will be sent."""
    for key, value in settings:
        for name in dict.fromkeys(ENVIRONMENT_REFERENCE.findall(repr(value))):
            yield Problem(key, f"{UNSET.format(name)}{'' if fatal else '; training will need it'}.", fatal=fatal)


def same_value(left: Any, right: Any) -> bool:
    """Whether two spellings have the same meaning: 20 and "20", true and "True", 1e-4 and 0.0001."""
    if left == right:
        return True
    if isinstance(left, dict | list) or isinstance(right, dict | list):
        return False
    texts = str(left).strip().lower(), str(right).strip().lower()
    try:
        return texts[0] == texts[1] or float(texts[0]) == float(texts[1])
    except ValueError:
        return False


def json_kind(value: Any) -> str:
    """The name of a value's JSON type, with an article."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "a text"}
    return kinds.get(type(value), "a number")


TRUE_WORDS = frozenset({"true", "1", "yes", "on"})
FALSE_WORDS = frozenset({"false", "0", "no", "off"})


def plain_key(written: str) -> str:
    """A key without `--` and with `_` for `-`."""
    return written.removeprefix("--").replace("-", "_")


def parse_flag(value: object) -> object:
    """True or False from a boolean, 0, 1 or a common word in any letter case."""
    word = str(value).strip().lower() if isinstance(value, str | int) else ""
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise ValueError("is not true or false")
    return word in TRUE_WORDS


def parse_integer(value: object) -> object:
    """An integer of at most 64 bits from a number or numeric text; 1.5 and True are refused."""
    try:
        # int() would truncate 1.5, so floats are parsed below; True is an int too.
        number = int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None  # "1e3" and "20.0" are whole numbers too
    if number is None:
        exact = parse_number(value, "is not a whole number")
        if not exact.is_integer():
            raise ValueError("is not a whole number")
        number = int(exact)
    if not -(2**63) <= number < 2**63:
        raise ValueError("is too large for a 64-bit number")
    return number


def parse_number(value: object, complaint: str = "is not a number") -> float:
    """A finite float from a number or numeric text such as "1e-4"."""
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(complaint)
    return number


def parse_text(value: object) -> object:
    """Text; numbers are converted as written."""
    # `true` as text is a mistake, such as a bare flag on the command line; 16 and 0.5 are valid names.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("is not text")
    return str(value)


def typed(value: Any) -> str:
    """A value as users write it: text unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def home_path(text: str) -> Path:
    """A path with `~` expanded if possible; unlike `Path.expanduser`, it never raises."""
    return Path(os.path.expanduser(text))  # noqa: PTH111


def absence_of(path: Path) -> str:
    """`'x' does not exist. Did you mean 'y'?`, with the nearest name beside it."""
    return f"{str(path)!r} does not exist.{similar_path(path)}"


def similar_path(path: Path, pattern: str = "*") -> str:
    """` Did you mean 'x'?` with the most similar name beside a path, or an empty string.

    Args:
        pattern: of the names to consider; `*/` means folders.
    """
    # Names alone: paths with the same long parent would all be similar.
    guess = nearest(path.name, sorted(each.name for each in path.parent.glob(pattern) if each.exists()))
    return f" Did you mean {str(path.parent / guess)!r}?" if guess else ""


def parse_path(value: object) -> object:
    """A valid path: a later lookup may fail only because the file is missing."""
    text = parse_text(value)
    try:
        Path(str(text)).expanduser().stat()
    except RuntimeError:  # from expanduser
        raise ValueError("starts with the home folder of an unknown user") from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):  # a missing path may be created later
            raise ValueError(f"cannot be accessed: {error.strerror}") from None
    except ValueError:
        raise ValueError("contains a character that no path can have") from None
    return text


def parse_json_text(value: object) -> object:
    """A list or object, or its JSON text (the only form on the command line)."""
    # All other texts are paths, names or comma-separated lists.
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return parse_json(value)
    return value


def parse_list(value: object) -> object:
    """A list, from a list, JSON text, comma-separated text or a single value."""
    value = parse_json_text(value)
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value if isinstance(value, list) else [value]


def parse_texts(value: object) -> object:
    """A list of texts, which may contain commas, from a list, JSON text or a single text."""
    value = parse_json_text(value)
    return value if isinstance(value, list) else [value]


def parse_objects(key: str, value: object) -> object:
    """A list of objects, from a list, one object, JSON text, or the path of a JSON file.

    `{env:NAME}` in the file expands; expanded values, and values of keys that look like secrets, are hidden in all
    output.
    """
    value = parse_json_text(value)
    if isinstance(value, str):
        path, problems = home_path(value), Problems()
        if not os.path.isfile(path):  # noqa: PTH113 - unlike Path's, never raises
            raise ValueError(f"{no_file(path)}; give a file, an object or a list of objects")
        # `canonical` expanded what config.json holds; this file is read later.
        value = problems.take(expand_environment(problems.take(read_json(path)), key, secret=True, keep_unset=True))
        if fatal := [problem.message.removesuffix(".") for problem in problems if problem.fatal]:
            raise ValueError("; ".join(fatal))
        hide_secrets({key: value})
    return [value] if isinstance(value, dict) else value


Flag = Annotated[bool, BeforeValidator(parse_flag)]
Integer = Annotated[int, BeforeValidator(parse_integer)]
Number = Annotated[float, BeforeValidator(parse_number)]
Text = Annotated[str, BeforeValidator(parse_text)]
PathText = Annotated[str, BeforeValidator(parse_path)]
TextList = Annotated[list[Text], BeforeValidator(parse_list)]
Texts = Annotated[list[Text], BeforeValidator(parse_texts)]
Json = Annotated[Any, BeforeValidator(parse_json_text)]


BYTES_TEXT = re.compile(r"([0-9.]+) ?([MGT])i?B?", re.IGNORECASE)


def parse_gigabytes(value: object) -> float:
    """GB from a number, or from text with a unit: "10G", "500 MB"."""
    match = BYTES_TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
    scale = {"M": 1e-3, "G": 1.0, "T": 1e3}[match[2].upper()] if match else 1.0
    return scale * parse_number(match[1] if match else value, "is not a size such as 10G or 500M")


Gigabytes = Annotated[float, BeforeValidator(parse_gigabytes)]
Size = tuple[int, int]  # width and height in pixels
# "1024" is a square; "1024.0" is a JSON number as text.
SIZE = re.compile(r"[0-9]{1,6}(\.0*)?(x[0-9]{1,6}(\.0*)?)?")


def parse_sizes(value: object) -> object:
    """(width, height) of each entry of a comma-separated list of `N` and `WxH`."""
    if isinstance(value, tuple):
        return value
    parts = [part.strip().lower() for part in str(parse_text(value)).split(",") if part.strip()]
    if wrong := [repr(part) for part in parts if not SIZE.fullmatch(part)]:
        named = f"contains {', '.join(wrong)}, which is not" if len(parts) > 1 else "is not"
        raise ValueError(f"{named} a size such as 1024 or 1280x768")
    if not parts:
        raise ValueError("contains no size")
    sides = (part.partition("x") for part in parts)
    return tuple((int(float(width)), int(float(height or width))) for width, _, height in sides)


def write_sizes(sizes: tuple[Size, ...] | None) -> str | None:
    """Sizes as written in a config."""
    return None if sizes is None else ",".join(f"{width}x{height}" for width, height in sizes)


# Serialised as users write sizes, so that the config.json of a checkpoint can be read again.
Sizes = Annotated[tuple[Size, ...], BeforeValidator(parse_sizes), PlainSerializer(write_sizes)]
