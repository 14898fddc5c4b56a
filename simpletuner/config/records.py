"""Settings that an earlier version recorded: in a checkpoint, or in the folder of a failed step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simpletuner.config.absent import REMOVED_IN, removed_keys, removed_values
from simpletuner.config.types import plain_key
from simpletuner.errors import Problems

# The last version that has the keys of removed.toml, and can finish a run with them.
LAST_WITH = "0.1.0"


def without_removed(settings: Mapping[str, Any], record: str, report: Problems) -> dict[str, Any]:
    """Recorded settings without removed ones; a warning lists those that had an effect.

    Args:
        record: the file, for the warning. A checkpoint records every key, also those that were off.
    """
    kept: dict[str, Any] = {}
    gone: list[str] = []
    recorded = {plain_key(key): value for key, value in settings.items()}
    for key, value in settings.items():
        name = plain_key(key)
        row = removed_keys("config").get(name)
        if row is not None:
            # A detail had an effect if the mechanism that it belongs to was on.
            mechanism = row.part_of or name
            if not removed_keys("config")[mechanism].asks_for_nothing(recorded.get(mechanism)):
                gone.append(name)
        elif str(value) in removed_values("config").get(name, {}):
            gone.append(f"{name} {value}")
        else:
            kept[key] = value
    if gone:
        was = "was" if len(gone) == 1 else "were"
        report.warn(record, f"{', '.join(gone)} {was} removed in {REMOVED_IN} and left out.")
    return kept


def trained_with_removed(settings: Mapping[str, Any]) -> list[str]:
    """The recorded settings that this version lacks and training depended on, as `key value`."""
    needed = []
    for key, value in settings.items():
        written = str(value).lower() if isinstance(value, bool) else str(value)
        row = removed_keys("config").get(key)
        if row is not None and not row.asks_for_nothing(value) and not row.continues:
            needed.append(f"{key} {written}")
        row = removed_values("config").get(key, {}).get(written)
        if row is not None and not row.continues:
            needed.append(f"{key} {written}")
    return needed
