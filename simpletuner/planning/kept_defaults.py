"""Defaults that a newer version has changed: a run keeps those that it began with.

A checkpoint records the value of every key, and which of them the user had set. A key that the user
has set neither then nor now keeps the recorded value, so that an update changes no run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from simpletuner.config.json_reader import read_json
from simpletuner.config.load import build_group
from simpletuner.config.optimizers import (
    ADAM_KEYS,
    OPTIMIZERS,
    chosen_settings,
    optimizer_name,
    optimizer_settings,
)
from simpletuner.config.records import without_removed
from simpletuner.config.schema import DEFAULTS, KEPT, Group, OptimizerConfig, RunConfig
from simpletuner.config.types import as_user_text
from simpletuner.errors import Problems
from simpletuner.planning.checkpoint_folder import Checkpoint

# Beginning of recorded keys, before the name of an optimizer's setting, whichever key sets it.
OPTIMIZER = "optimizer_config."


def with_defaults_of(checkpoint: Checkpoint, config: RunConfig) -> RunConfig:
    """The settings of a run that continues or is sampled, with the defaults that it began with."""
    origins = checkpoint.manifest.identity.origins
    if not origins:  # the first checkpoints did not record what the user had set
        return config
    path = checkpoint.path / "config.json"
    recorded = without_removed(read_json(path, Problems(), dict) or {}, str(path), Problems())
    if recorded.get("model_flavour") != config.model.model_flavour:  # it has defaults of its own
        return config
    set_by_user = {key: recorded[key] for key in recorded if not _is_default(origins, key)}
    unset = {key: value for key, value in recorded.items() if key not in set_by_user}
    config = config.with_values(changed_defaults(unset, config), KEPT)
    return _with_optimizer_defaults(checkpoint, set_by_user, config)


def _is_default(origins: Mapping[str, str], key: str) -> bool:
    return origins.get(key, "default") in DEFAULTS


def changed_defaults(unset: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """The values that differ, of keys that are not set now.

    Args:
        unset: recorded values of the keys that were not set then.
    """
    changed: dict[str, Any] = {}
    for group, now in config.groups.items():
        for key, then in _valid(group, unset).items():
            if _is_default(config.origins, key) and then != getattr(now, key):
                changed[key] = then
    return changed


def _valid(group: type[Group], recorded: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded values of a group that this version accepts, as it reads them."""
    fields = {name: recorded[name] for name in group.model_fields if name in recorded}
    problems = Problems()
    values = build_group(group, fields, problems)
    invalid = {re.split(r"[.\[]", problem.where)[0] for problem in problems}
    return {key: getattr(values, key) for key in fields if key not in invalid}


def _with_optimizer_defaults(
    checkpoint: Checkpoint, set_by_user: Mapping[str, Any], config: RunConfig
) -> RunConfig:
    """The settings with the optimizer's numbers that were defaults, if it is the same optimizer.

    They are defaults of the optimizer, not of a key, so the checkpoint records them as effective
    values only.
    """
    recorded = checkpoint.manifest.identity.settings
    precision = config.precision.mixed_precision
    name = optimizer_name(config.optimizer, precision)
    if recorded.get("optimizer") != name:
        return config
    spec = OPTIMIZERS[name]
    chosen_then = OptimizerConfig(**_valid(OptimizerConfig, set_by_user))
    chosen = {*chosen_settings(chosen_then, spec), *chosen_settings(config.optimizer, spec)}
    kept = {}
    for setting, now in optimizer_settings(config.optimizer, precision).items():
        then = recorded.get(f"{OPTIMIZER}{setting}", now)  # older versions wrote fewer
        if setting not in chosen and then != now:
            kept[setting] = then
    return config.with_values(_as_keys(kept, config.optimizer, is_adam=spec.is_adam), KEPT)


def _as_keys(
    settings: Mapping[str, Any], config: OptimizerConfig, *, is_adam: bool
) -> dict[str, Any]:
    """The keys that give an optimizer these settings.

    Where the user writes `optimizer_config`, settings without a key of their own are left out, and
    reported as changed.
    """
    own_keys = {setting: key for key, setting in ADAM_KEYS.items()} if is_adam else {}
    values: dict[str, Any] = {}
    others = []
    for setting, value in settings.items():
        if setting in own_keys:
            values[own_keys[setting]] = value
        else:
            others.append(f"{setting}={as_user_text(value)}")
    if others and config.optimizer_config is None:
        values["optimizer_config"] = ",".join(others)
    return values
