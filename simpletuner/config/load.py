"""From layers of raw keys and values to a checked `RunConfig`.

A layer is one source of settings: family defaults, config.env, config.json, the command line. `resolve` merges them,
records which one each value comes from, and collects all problems.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from simpletuner.config import schema
from simpletuner.config.crepa import CrepaConfig
from simpletuner.config.json_files import expand_environment, json_kind, read_json, same_value
from simpletuner.config.launch import LaunchConfig
from simpletuner.config.layersync import LayerSyncConfig
from simpletuner.config.lora import LoraConfig
from simpletuner.config.loss import LossConfig, MaskedLossConfig, PreservationConfig
from simpletuner.config.messages import problems_of, unknown_key, with_stand_ins
from simpletuner.config.option import Group, TechniqueGroup
from simpletuner.config.publishing import PublishConfig
from simpletuner.config.scheduled_sampling import ScheduledSamplingConfig
from simpletuner.config.tread import TreadConfig
from simpletuner.config.upstream import foreign_key_problem
from simpletuner.config.values import plain_key
from simpletuner.config.webhooks import WebhookConfig
from simpletuner.errors import ConfigError, Problem
from simpletuner.redaction import hide_secrets

GroupType = TypeVar("GroupType", bound=Group)
# Sections whose values nothing needs before something is sent.
SENDING = ("Publishing", "Webhooks")
FAMILY_DEFAULT = "family default"
FAMILY_FIXED = "fixed by the family"
CHOSEN = "chosen by offload auto"
BY_SIZE = "chosen by the size of previews"
NOT_SET_BY_USER = ("default", FAMILY_DEFAULT, FAMILY_FIXED, CHOSEN, BY_SIZE)


@dataclass(frozen=True)
class Layer:
    """Raw settings from one source.

    `label` names the source in the plan; `last_wins` is for the command line, where a repeated key is a correction and
    not a mistake.
    """

    label: str
    values: Sequence[tuple[str, Any]]
    last_wins: bool = False


@dataclass(frozen=True)
class FamilyOptions:
    """The option groups of all model families; those of other families than the run's have no effect."""

    groups: Mapping[type[Group], Group]

    def of(self, group: type[GroupType]) -> GroupType:
        """The group of one family."""
        return cast(GroupType, self.groups[group])


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, one immutable group per component, with the origin of every key."""

    model: schema.ModelConfig
    run: schema.RunOptions
    tracking: schema.TrackingConfig
    publish: PublishConfig
    webhooks: WebhookConfig
    schedule: schema.ScheduleConfig
    checkpoints: schema.CheckpointConfig
    optimizer: schema.OptimizerConfig
    precision: schema.PrecisionConfig
    speed: schema.SpeedConfig
    launch: LaunchConfig
    ema: schema.EmaConfig
    lora: LoraConfig
    offload: schema.OffloadConfig
    caching: schema.CachingConfig
    flow: schema.FlowConfig
    text: schema.TextConfig
    loss: LossConfig
    masked_loss: MaskedLossConfig
    preservation: PreservationConfig
    tread: TreadConfig
    crepa: CrepaConfig
    layersync: LayerSyncConfig
    scheduled_sampling: ScheduledSamplingConfig
    validation: schema.ValidationConfig
    validation_adapters: schema.ValidationAdapterConfig
    evaluation: schema.EvaluationConfig
    datasets: schema.DatasetDefaults
    family: FamilyOptions
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def techniques(self) -> list[TechniqueGroup]:
        """The groups of all techniques, on or off."""
        groups = (getattr(self, attribute) for attribute in schema.GROUPS)
        return [group for group in groups if isinstance(group, TechniqueGroup)]

    @property
    def sampling_shift(self) -> float | None:
        """The shift that the user set explicitly for training, which replaces the checkpoint's in sampling."""
        return self.flow.flow_schedule_shift if self.is_explicit("flow_schedule_shift") else None

    def is_explicit(self, key: str) -> bool:
        """Whether the user set the key, in a file or on the command line."""
        return self.origins.get(key, "default") not in NOT_SET_BY_USER

    def with_values(self, values: Mapping[str, Any], origin: str) -> RunConfig:
        """The config with some keys replaced, and `origin` recorded as their source."""
        updates = {}
        for attribute, group in schema.GROUPS.items():
            own = {name: value for name, value in values.items() if name in group.model_fields}
            if own:
                updates[attribute] = getattr(self, attribute).model_copy(update=own)
        return replace(self, **cast(Any, updates), origins={**self.origins, **dict.fromkeys(values, origin)})

    def flat(self) -> dict[str, Any]:
        """Every key and its value, for snapshots and the plan."""
        groups = [*(getattr(self, attribute) for attribute in schema.GROUPS), *self.family.groups.values()]
        return {name: value for group in groups for name, value in group.model_dump(by_alias=True).items()}


def read_json_layer(path: Path, problems: list[Problem]) -> Layer | None:
    """config.json as a layer, or None if it cannot be read; `{"_metadata": ..., "config": {...}}` is unwrapped."""
    known = len(problems)
    content = read_json(path, problems)
    if isinstance(content, dict) and "_metadata" in content and isinstance(content.get("config"), dict):
        content = content["config"]
    if isinstance(content, dict):
        return Layer(str(path), list(content.items()))
    if not any(problem.fatal for problem in problems[known:]):
        problems.append(Problem(str(path), f"must hold one JSON object, not {json_kind(content)}."))
    return None


def with_family(layers: Sequence[Layer], defaults: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[Layer]:
    """The user's layers, between the defaults of a family and the values it fixes."""
    return [Layer(FAMILY_DEFAULT, list(defaults.items())), *layers, Layer(FAMILY_FIXED, list(fixed.items()))]


def resolve(layers: Sequence[Layer], problems: list[Problem]) -> RunConfig:
    """Merge the layers, later ones overriding earlier ones, and build the config.

    Problems are added to the list. If one is fatal, the config is only good for finding more of them.
    """
    options = schema.all_options()
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for name, value in canonical(layer, problems).items():
            if layer.label == FAMILY_FIXED and name in values and not same_value(values[name], value):
                message = f"{values[name]!r} is ignored: the model fixes it to {value!r}. ({origins[name]})"
                problems.append(Problem(name, message, fatal=False))
            values[name], origins[name] = value, layer.label
            if value is None:
                _forget(name, layers[0], values, origins)
    invalid: list[Problem] = []
    groups = {attribute: _pick(group, values, invalid) for attribute, group in schema.GROUPS.items()}
    family = FamilyOptions({group: _pick(group, values, invalid) for group in schema.family_groups()})
    problems.extend(_with_origin(problem, origins) for problem in invalid)
    origins = {name: origins.get(name, "default") for name in options}
    return RunConfig(**cast(Any, groups), family=family, origins=origins)


def _pick(group: type[GroupType], values: Mapping[str, Any], problems: list[Problem]) -> GroupType:
    """Build a group from its keys among all values."""
    return build_group(group, {name: values[name] for name in group.model_fields if name in values}, problems)


def build_group(
    group: type[GroupType], values: Mapping[str, Any], problems: list[Problem], prefix: str = ""
) -> GroupType:
    """Build a group from its values. Invalid ones are reported and replaced, so that the rest can be checked too."""
    try:
        return group.model_validate(values)
    except ValidationError as error:
        problems.extend(problems_of(error, group, prefix))
        return group.model_validate(with_stand_ins(values, error, group))


def canonical(layer: Layer, problems: list[Problem]) -> dict[str, Any]:
    """A layer's values by canonical key: `--` stripped, aliases resolved, variables expanded, None for unset."""
    names = schema.option_names()
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    source = f" ({layer.label})" if layer.label else ""
    for written, raw in layer.values:
        key = plain_key(written)
        hide_secrets({key: raw})
        if key not in names:
            unknown = Problem(written, f"{unknown_key(key, list(names))}{source}")
            problems.append(foreign_key_problem(written, key, raw, source) or unknown)
            continue
        name = names[key].name
        value = expand_environment(
            raw, name, problems, secret=names[key].may_hold_secret, keep_unset=names[key].section in SENDING
        )
        if value == "":  # an empty resume_from_checkpoint asks for a new run; unset is latest
            value = "none" if name == "resume_from_checkpoint" else None
        if value is None:
            values.setdefault(name, None)
            continue
        if values.get(name) is not None and not same_value(values[name], value):
            message = f"is given twice: {spelled[name]}={values[name]!r} and {written}={value!r}{source}."
            note = " The last one is used." if layer.last_wins else ""
            problems.append(Problem(name, message + note, fatal=not layer.last_wins))
        values[name], spelled[name] = value, written
    return values


def _forget(name: str, first: Layer, values: dict[str, Any], origins: dict[str, str]) -> None:
    """Reset an unset key to its family's default, overriding the user's lower-priority layers."""
    del values[name], origins[name]
    family = dict(first.values) if first.label == FAMILY_DEFAULT else {}
    if name in family:
        values[name], origins[name] = family[name], FAMILY_DEFAULT


def _with_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """The problem with the source of its value, such as a file, appended."""
    origin = origins.get(re.split(r"[.\[]", problem.where)[0])
    return replace(problem, message=f"{problem.message} ({origin})") if origin else problem


def raise_if_fatal(problems: Sequence[Problem]) -> None:
    """Raise all problems in one message if any of them is fatal."""
    if any(problem.fatal for problem in problems):
        raise ConfigError(problems)
