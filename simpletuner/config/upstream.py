"""Keys of other trainers that do not exist here, and what to use instead: the words are in upstream.toml."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Literal

from simpletuner.config.values import FALSE_WORDS
from simpletuner.errors import Problem

# Values that switch a key off.
OFF = frozenset({"", "none", "null", "0", "0.0", "[]", "{}"}) | FALSE_WORDS
# Values of single keys that ask for what is done anyway.
NEUTRAL = {
    "gradient_checkpointing_backend": "torch",
    "disk_low_action": "stop",
    "evaluation_type": "none",
    "validation_lycoris_strength": "1",
}


File = Literal["config", "datasets"]


@functools.cache
def instead_of(file: File) -> dict[str, str]:
    """What to use instead of each key in a config.json, or in a dataset file with its words for `type`."""
    # Read when somebody has such a key: a run that has none does not need it.
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[file]
    return {key: words for keys, words in table.items() for key in keys.split()}


def foreign_key_problem(written: str, key: str, value: Any, source: str, file: File) -> Problem | None:
    """The problem for a key of another trainer; None for any other key.

    A value that switches nothing on is not an error, since the run is what the user wants.
    """
    if (instead := instead_of(file).get(key)) is None:
        return None
    neutral = (NEUTRAL[key],) if NEUTRAL.get(key, "").isdecimal() else (*OFF, NEUTRAL.get(key))  # 0 is a strength, too
    off = value is None or str(value).strip().lower().removesuffix(".0") in neutral
    note = " It is off and is ignored." if off else ""
    return Problem(written, f"is not a key here: {instead}.{note}{source}", not off, {written: None})
