"""Keys and values that this version lacks: those of other trainers, and of earlier versions.

upstream.toml has replacements for the former, and removed.toml the fate of the latter. A key that
asks for nothing is ignored; any other is an error, since the run would not be what its user wants.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from simpletuner.config.json_reader import read_toml, same_value
from simpletuner.config.types import FALSE_WORDS, TRUE_WORDS
from simpletuner.errors import Problem

PACKAGE = "simpletuner.config"
REMOVED_IN = "0.2.0"
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
# The tables of removed values, by file.
VALUES: dict[File, str] = {"config": "config_values", "datasets": "dataset_values"}


@dataclass(frozen=True)
class Removed:
    """A key or a value that earlier versions had: a row of removed.toml.

    Attributes:
        instead: what to do without it, worded to follow "was removed in 0.2.0: ".
        off: values of the key that ask for nothing.
        part_of: the key that it belonged to; alone it asks for nothing.
        continues: training does not depend on it, so a run that used it can be continued.
    """

    instead: str = ""
    off: Sequence[Any] = (False,)
    part_of: str = ""
    continues: bool = False

    @property
    def why(self) -> str:
        """Why the key is absent, worded to follow its name."""
        if self.part_of:
            return f"was removed in {REMOVED_IN} with {self.part_of}"
        return f"was removed in {REMOVED_IN}: {self.instead}"

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether the key with this value had no effect, or that of its default."""
        if self.part_of or value is None or value == "":
            return True
        return any(_means_the_same(value, off) for off in self.off)


def _means_the_same(value: Any, off: Any) -> bool:
    """Whether two spellings have the same meaning, those of true and false included."""
    if isinstance(off, bool):
        return str(value).strip().lower() in (TRUE_WORDS if off else FALSE_WORDS)
    if isinstance(off, list):
        return str(value).replace(" ", "") == str(off)  # on the command line, [] is a text
    return same_value(value, off)


@functools.cache
def removed_keys(file: File) -> dict[str, Removed]:
    """The keys of earlier versions, by name."""
    removed: dict[str, Removed] = {}
    for keys, row in read_toml(PACKAGE, "removed.toml")[file].items():
        removed |= dict.fromkeys(keys.split(), Removed(**row))
    return removed


@functools.cache
def removed_values(file: File) -> dict[str, dict[str, Removed]]:
    """The words that keys of this version had in earlier ones, by key and word."""
    removed = {}
    for key, rows in read_toml(PACKAGE, "removed.toml")[VALUES[file]].items():
        removed[key] = {word: Removed(**row) for word, row in rows.items()}
    return removed


def why_no_value(key: str, word: str) -> str:
    """Why a key no longer has this word, worded to follow it; empty if it never had it."""
    for file in VALUES:
        row = removed_values(file).get(key, {}).get(word)
        if row is not None:
            return row.why
    return ""


def why_no_word(word: str) -> str:
    """Why no key has a word that one had, worded to follow it; empty if none ever had it."""
    for file in VALUES:
        for key, rows in removed_values(file).items():
            if word in rows:
                return f"is a value of {key} that {rows[word].why}"
    return ""


@functools.cache
def instead_of(file: File) -> dict[str, str]:
    """Replacements for keys of other trainers; of a dataset file, also for its types.

    A key that ends with `*` stands for all keys that begin like it.
    """
    # Read lazily: most runs have no foreign key.
    replacements: dict[str, str] = {}
    for keys, words in read_toml(PACKAGE, "upstream.toml")[file].items():
        replacements |= dict.fromkeys(keys.split(), words)
    return replacements


@functools.cache
def simpletuner_defaults() -> dict[str, Any]:
    """SimpleTuner's settings with its own defaults; "" means none."""
    return dict(read_toml(PACKAGE, "simpletuner.toml")["defaults"])


@functools.cache
def simpletuner_variables() -> dict[str, str]:
    """Variables of SimpleTuner's config.env whose name differs from their setting's."""
    return dict(read_toml(PACKAGE, "simpletuner.toml")["environment"])


def is_simpletuner_default(key: str, value: Any, file: File) -> bool:
    """Whether a key has SimpleTuner's own default, as many keys of its config files do."""
    if file != "config" or key not in simpletuner_defaults() or key in removed_keys(file):
        return False
    default = simpletuner_defaults()[key]
    if same_value(value, default):
        return True
    return _is_off(key, value) and _is_off(key, default)


def why_absent(key: str, file: File) -> str:
    """Why this version does not have a key, worded to follow it; empty if the key is unknown."""
    removed = removed_keys(file).get(key)
    if removed is not None:
        return removed.why
    instead = _replacement(key, file)
    return f"is not a key here: {instead}" if instead else ""


def absent_key_problem(
    written: str, key: str, value: Any, source: str, file: File, *, is_typed: bool
) -> Problem | None:
    """The problem for a key of another trainer or of an earlier version; None for all other keys.

    Args:
        is_typed: the key is on the command line, where its user expects an answer.
    """
    why = why_absent(key, file)
    if not why:
        return None
    note = _note(key, value, file, is_typed=is_typed)
    is_ignored = bool(note)
    message = f"{why}.{note}{source}"
    return Problem(written, message, fatal=not is_ignored, remedy={written: None})


def _replacement(key: str, file: File) -> str:
    """What to use instead of a key of another trainer; empty if the key is unknown."""
    table = instead_of(file)
    if key in table:
        return table[key]
    is_config = file == "config"
    setting = simpletuner_variables().get(key.upper()) if is_config else None
    if setting is not None:
        return table.get(setting, f"{setting} is its name")
    for pattern, words in table.items():
        if pattern.endswith("*") and key.startswith(pattern.removesuffix("*")):
            return words
    return "it is not supported" if is_config and key in simpletuner_defaults() else ""


def _note(key: str, value: Any, file: File, *, is_typed: bool) -> str:
    """That a key is ignored, if it asks for nothing; else an empty text."""
    removed = removed_keys(file).get(key)
    if removed is not None:
        return " It is ignored." if removed.asks_for_nothing(value) else ""
    if key in OBSOLETE and not is_typed:
        return " It is ignored."
    return " It is off and is ignored." if _is_off(key, value) else ""


def _is_off(key: str, value: Any) -> bool:
    """Whether a value of a foreign key enables nothing."""
    if value is None:
        return True
    word = str(value).strip().lower().removesuffix(".0")
    neutral = NEUTRAL.get(key)
    if neutral is not None and neutral.isdecimal():
        return word == neutral  # only this number, since 0 is a strength too
    return word in OFF or word == neutral
