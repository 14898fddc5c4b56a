"""From layers of raw keys and values to a checked `RunConfig`.

A layer is one source of settings: family defaults, config.env, config.json, the command line. `resolve` lays them
over each other, remembers which one decided each key, and collects every problem before it complains.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from simpletuner.errors import ConfigError, Problem

from . import schema
from .messages import problems_of, unknown_key
from .option import Option

ENVIRONMENT_REFERENCE = re.compile(r"\{env:([^}]*)\}")
# A comma before a closing bracket, and every string (so that commas inside strings are left alone).
TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])')


@dataclass(frozen=True)
class Layer:
    """Settings from one source, still as they were written.

    `label` is how the plan names the source; `last_wins` is for the command line, where a repeated key is not
    a mistake in a file but a correction.
    """

    label: str
    values: Sequence[tuple[str, Any]]
    last_wins: bool = False


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, one immutable group per component, with the origin of every key."""

    model: schema.ModelConfig
    run: schema.RunOptions
    tracking: schema.TrackingConfig
    publish: schema.PublishConfig
    schedule: schema.ScheduleConfig
    checkpoints: schema.CheckpointConfig
    optimizer: schema.OptimizerConfig
    precision: schema.PrecisionConfig
    launch: schema.LaunchConfig
    ema: schema.EmaConfig
    lora: schema.LoraConfig
    offload: schema.OffloadConfig
    caching: schema.CachingConfig
    flow: schema.FlowConfig
    text: schema.TextConfig
    loss: schema.LossConfig
    tread: schema.TreadConfig
    crepa: schema.CrepaConfig
    scheduled_sampling: schema.ScheduledSamplingConfig
    validation: schema.ValidationConfig
    evaluation: schema.EvaluationConfig
    datasets: schema.DatasetDefaults
    origins: Mapping[str, str] = field(default_factory=dict)

    def is_explicit(self, key: str) -> bool:
        """Whether the user set the key, in a file or on the command line."""
        return self.origins.get(key, "default") not in ("default", "family default")

    def flat(self) -> dict[str, Any]:
        """Every key and its value, for snapshots and the plan."""
        return {name: value for group in schema.GROUPS for name, value in getattr(self, group).model_dump().items()}


class DuplicateKeysError(ValueError):
    """A JSON object says the same key twice with different values."""


def read_json(path: Path, problems: list[Problem]) -> Any:
    """The JSON value in a file, or None with the problem (file, line, column) added to the list.

    A comma before a closing bracket is accepted with a warning: published examples contain one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problems.append(Problem(str(path), f"is not UTF-8 text (byte {error.start})."))
        return None
    except OSError as error:
        problems.append(Problem(str(path), f"cannot be read: {error.strerror}."))
        return None
    mended = TRAILING_COMMA.sub(lambda match: match.group(1) or " ", text)
    if mended != text:
        problems.append(Problem(str(path), "has a comma before a closing bracket; it was ignored.", fatal=False))
    try:
        return json.loads(mended, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        message = f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        problems.append(Problem(str(path), message))
    except DuplicateKeysError as error:
        problems.append(Problem(str(path), str(error)))
    return None


def read_json_layer(path: Path, problems: list[Problem]) -> Layer:
    """config.json as a layer; `{"_metadata": ..., "config": {...}}` is unwrapped."""
    content = read_json(path, problems)
    if isinstance(content, dict) and "_metadata" in content and isinstance(content.get("config"), dict):
        content = content["config"]
    if content is not None and not isinstance(content, dict):
        problems.append(Problem(str(path), f"must hold one JSON object, not a {type(content).__name__}."))
    return Layer(str(path), list(content.items()) if isinstance(content, dict) else [])


def resolve(layers: Sequence[Layer], problems: list[Problem]) -> RunConfig | None:
    """Lay the layers over each other (the last is the strongest) and build the config.

    Problems are added to the list. None is returned when a group could not be built.
    """
    options = schema.all_options()
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for name, value in canonical(layer, options, problems).items():
            values[name], origins[name] = value, layer.label
    groups = {}
    for attribute, group in schema.GROUPS.items():
        own = {name: values[name] for name in group.model_fields if name in values}
        try:
            groups[attribute] = group.model_validate(own)
        except ValidationError as error:
            problems.extend(problems_of(error, group))
    if len(groups) < len(schema.GROUPS):
        return None
    return RunConfig(**cast(Any, groups), origins={name: origins.get(name, "default") for name in options})


def canonical(layer: Layer, options: Mapping[str, Option], problems: list[Problem]) -> dict[str, Any]:
    """The set values of a layer by canonical key: `--` stripped, aliases resolved, variables expanded."""
    names = {alias: option.name for option in options.values() for alias in (option.name, *option.aliases)}
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for written, raw in layer.values:
        key = written.removeprefix("--").replace("-", "_")
        name = names.get(key)
        if name is None:
            problems.append(Problem(written, f"{unknown_key(key, list(names))} ({layer.label})"))
            continue
        value = "none" if name == "resume_from_checkpoint" and raw == "" else raw
        if value is None or value == "":
            continue
        value = expand_environment(value, name, problems)
        if name in values and values[name] != value:
            message = f"is given twice: {spelled[name]}={values[name]!r} and {written}={value!r} ({layer.label})."
            note = " The last one is used." if layer.last_wins else ""
            problems.append(Problem(name, message + note, fatal=not layer.last_wins))
        values[name], spelled[name] = value, written
    return values


def expand_environment(value: Any, where: str, problems: list[Problem]) -> Any:
    """Replace `{env:NAME}` in strings, inside lists and objects too; an unset variable is a problem."""
    if isinstance(value, dict):
        return {key: expand_environment(inner, where, problems) for key, inner in value.items()}
    if isinstance(value, list):
        return [expand_environment(inner, where, problems) for inner in value]
    if not isinstance(value, str):
        return value

    def lookup(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in os.environ:
            problems.append(Problem(where, f"{value!r} needs the environment variable {name}, which is not set."))
        return os.environ.get(name, "")

    return ENVIRONMENT_REFERENCE.sub(lookup, value)


def raise_if_fatal(problems: Sequence[Problem]) -> None:
    """Stop with all problems in one message, if any of them forbids the run."""
    if any(problem.fatal for problem in problems):
        raise ConfigError(problems)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise DuplicateKeysError(f"says {key!r} twice: {result[key]!r} and {value!r}.")
        result[key] = value
    return result
