"""Keys of other trainers that do not exist here, with replacements from upstream.toml."""

from __future__ import annotations

import functools
from typing import Any, Literal

from simpletuner.config.values import FALSE_WORDS, read_toml
from simpletuner.errors import Problem

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
WITHOUT_EFFECT = frozenset({"plan_device", "plan_device_memory_gb", "device", "device_memory"})


File = Literal["config", "datasets"]


@functools.cache
def instead_of(file: File) -> dict[str, str]:
    """Replacements for keys of a config.json, or for keys and `type` words of a dataset file."""
    # Read lazily: most runs have no foreign key.
    table = read_toml("simpletuner.config", "upstream.toml")[file]
    return {key: words for keys, words in table.items() for key in keys.split()}


def foreign_key_problem(
    written: str, key: str, value: Any, source: str, file: File, *, is_typed: bool
) -> Problem | None:
    """The problem for a key of another trainer or of an older version; None for all other keys.

    A value that enables nothing is not an error: the run is what the user wants.

    Args:
        is_typed: the key is on the command line, where its user expects an answer.
    """
    if (instead := instead_of(file).get(key)) is None:
        return None
    neutral = (NEUTRAL[key],) if NEUTRAL.get(key, "").isdecimal() else (*OFF, NEUTRAL.get(key))  # 0 may be a strength
    off = value is None or str(value).strip().lower().removesuffix(".0") in neutral
    note = " It is off and is ignored." if off else ""
    if key in WITHOUT_EFFECT and not is_typed:
        off = True
        note = " It is ignored."
    return Problem(written, f"is not a key here: {instead}.{note}{source}", not off, {written: None})
