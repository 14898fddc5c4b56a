"""Keys of other trainers that do not exist here, with replacements from upstream.toml, and SimpleTuner's defaults."""

from __future__ import annotations

import functools
from typing import Any, Literal

from simpletuner.config.values import FALSE_WORDS, read_toml, same_value
from simpletuner.errors import Problem

PACKAGE = "simpletuner.config"
# Values that switch a key off.
OFF = frozenset({"", "none", "null", "0", "0.0", "[]", "{}"}) | FALSE_WORDS
# Values of particular keys that request the behaviour of this trainer.
NEUTRAL = {
    "gradient_checkpointing_backend": "torch",
    "disk_low_action": "stop",
    "evaluation_type": "none",
    "validation_lycoris_strength": "1",
}
# Keys that older versions wrote into files, and that have no part in a run.
OBSOLETE = frozenset({"plan_device", "plan_device_memory_gb", "device", "device_memory"})


File = Literal["config", "datasets"]


@functools.cache
def instead_of(file: File) -> dict[str, str]:
    """Replacements for keys of a config.json, or for keys and `type` words of a dataset file.

    A key that ends with `*` stands for all keys that begin like it.
    """
    # Read lazily: most runs have no foreign key.
    table = read_toml(PACKAGE, "upstream.toml")[file]
    return {key: words for keys, words in table.items() for key in keys.split()}


@functools.cache
def simpletuner_defaults() -> dict[str, Any]:
    """SimpleTuner's settings with its own defaults; "" means none."""
    return dict(read_toml(PACKAGE, "simpletuner.toml")["defaults"])


@functools.cache
def simpletuner_variables() -> dict[str, str]:
    """Variables of SimpleTuner's config.env that are not named like their setting, with the setting."""
    return dict(read_toml(PACKAGE, "simpletuner.toml")["environment"])


def asks_for_nothing(key: str, value: Any, file: File) -> bool:
    """Whether a key of SimpleTuner has the default that it has there: its config files hold many of these."""
    defaults = simpletuner_defaults() if file == "config" else {}
    if key not in defaults:
        return False
    default = defaults[key]
    return same_value(value, default) or (_is_off(key, value) and _is_off(key, default))


def replacement(key: str, file: File) -> str:
    """What to use instead of a key of another trainer; empty if the key is unknown."""
    table = instead_of(file)
    if key in table:
        return table[key]
    setting = simpletuner_variables().get(key.upper()) if file == "config" else None
    if setting is not None:
        return table.get(setting, f"{setting} is its name")
    for pattern, words in table.items():
        if pattern.endswith("*") and key.startswith(pattern[:-1]):
            return words
    return "it is not supported" if file == "config" and key in simpletuner_defaults() else ""


def foreign_key_problem(
    written: str, key: str, value: Any, source: str, file: File, *, is_typed: bool
) -> Problem | None:
    """The problem for a key of another trainer or of an older version; None for all other keys.

    A value that enables nothing is not an error: the run is what the user wants.

    Args:
        is_typed: the key is on the command line, where its user expects an answer.
    """
    instead = replacement(key, file)
    if not instead:
        return None
    is_obsolete = key in OBSOLETE and not is_typed
    is_ignored = is_obsolete or _is_off(key, value)
    note = ""
    if is_ignored:
        note = " It is ignored." if is_obsolete else " It is off and is ignored."
    return Problem(written, f"is not a key here: {instead}.{note}{source}", not is_ignored, {written: None})


def _is_off(key: str, value: Any) -> bool:
    """Whether a value of a foreign key enables nothing."""
    neutral = NEUTRAL.get(key)
    # 0 may be a strength, so where a number is neutral, only that number is.
    words = (neutral,) if neutral is not None and neutral.isdecimal() else (*OFF, neutral)
    return value is None or str(value).strip().lower().removesuffix(".0") in words
