"""The types of options: they parse what users write in a file or a flag, and reject the rest."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, PlainSerializer

from simpletuner.config.json_reader import expand_environment, parse_json, read_json
from simpletuner.config.paths import home_path, why_no_file
from simpletuner.errors import Problems
from simpletuner.redaction import hide_secrets

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
    number = None
    # int() would truncate 1.5, so floats are parsed below; True is an int too.
    if isinstance(value, int | str) and not isinstance(value, bool):
        with suppress(ValueError):  # "1e3" and "20.0" are whole numbers too
            number = int(value)
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
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise ValueError(complaint)
    return number


def parse_text(value: object) -> object:
    """Text; numbers are converted as written."""
    # `true` as text is a mistake, such as a bare flag on the command line; 16 and 0.5 are valid
    # names.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("is not text")
    return str(value)


def as_user_text(value: Any) -> str:
    """A value as users write it: text unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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

    `{env:NAME}` in the file expands; expanded values, and values of keys that look like secrets,
    are hidden in all output.
    """
    value = parse_json_text(value)
    if isinstance(value, str):
        value = _read_objects(key, home_path(value))
    return [value] if isinstance(value, dict) else value


def _read_objects(key: str, path: Path) -> object:
    """The content of the JSON file that a key names, expanded.

    Raises:
        ValueError: it cannot be read.
    """
    if not os.path.isfile(path):  # noqa: PTH113 - unlike Path's, never raises
        raise ValueError(f"{why_no_file(path)}; give a file, an object or a list of objects")
    problems = Problems()
    content = read_json(path, problems)
    # Here, since `canonical` expands only what config.json itself holds.
    content = expand_environment(content, key, problems, secret=True, keep_unset=True)
    faults = [problem.message.removesuffix(".") for problem in problems if problem.fatal]
    if faults:
        raise ValueError("; ".join(faults))
    hide_secrets({key: content})
    return content


Flag = Annotated[bool, BeforeValidator(parse_flag)]
Integer = Annotated[int, BeforeValidator(parse_integer)]
Number = Annotated[float, BeforeValidator(parse_number)]
Text = Annotated[str, BeforeValidator(parse_text)]
PathText = Annotated[str, BeforeValidator(parse_path)]
TextList = Annotated[list[Text], BeforeValidator(parse_list)]
Texts = Annotated[list[Text], BeforeValidator(parse_texts)]
Json = Annotated[Any, BeforeValidator(parse_json_text)]
BYTES_TEXT = re.compile(r"([0-9.]+) ?([MGT])i?B?", re.IGNORECASE)
GIGABYTES = {"M": 1e-3, "G": 1.0, "T": 1e3}  # in a unit


def parse_gigabytes(value: object) -> float:
    """GB from a number, or from text with a unit: "10G", "500 MB"."""
    scale = 1.0
    match = BYTES_TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        value = match[1]
        scale = GIGABYTES[match[2].upper()]
    return scale * parse_number(value, "is not a size such as 10G or 500M")


Gigabytes = Annotated[float, BeforeValidator(parse_gigabytes)]


class Size(NamedTuple):
    """Width and height in pixels; a text as users write it, such as 768x512."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    def __repr__(self) -> str:
        # As lists of sizes have always been shown in messages and records.
        return repr(tuple(self))

    def of_frames(self, frames: int) -> str:
        """The size of a picture, or of a clip of this many frames: 768x512, 768x512@61."""
        return f"{self}@{frames}" if frames > 1 else str(self)


# "1024" is a square; "1024.0" is a JSON number as text.
SIZE = re.compile(r"[0-9]{1,6}(\.0*)?(x[0-9]{1,6}(\.0*)?)?")


def parse_sizes(value: object) -> object:
    """(width, height) of each entry of a comma-separated list of `N` and `WxH`."""
    if isinstance(value, tuple):
        return value
    parts = [part.strip().lower() for part in str(parse_text(value)).split(",") if part.strip()]
    if not parts:
        raise ValueError("contains no size")
    wrong = [repr(part) for part in parts if not SIZE.fullmatch(part)]
    if wrong:
        fault = f"contains {', '.join(wrong)}, which is not" if len(parts) > 1 else "is not"
        raise ValueError(f"{fault} a size such as 1024 or 1280x768")
    sizes = []
    for part in parts:
        width, _, height = part.partition("x")
        sizes.append(Size(int(float(width)), int(float(height or width))))
    return tuple(sizes)


def write_sizes(sizes: tuple[Size, ...] | None) -> str | None:
    """Sizes as written in a config."""
    return None if sizes is None else ",".join(map(str, sizes))


# Serialised as users write sizes, so that the config.json of a checkpoint can be read again.
Sizes = Annotated[tuple[Size, ...], BeforeValidator(parse_sizes), PlainSerializer(write_sizes)]
