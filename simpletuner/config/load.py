"""Resolves layers of raw keys and values into a checked `RunConfig`.

A layer is one source of settings: family defaults, config.env, config.json, the command line.
`resolve` merges the layers, records the origin of every value and collects all problems, with
pydantic's messages reworded for users.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from simpletuner.config import schema
from simpletuner.config.absent import File, absent_key_problem, is_simpletuner_default, why_no_value
from simpletuner.config.json_reader import expand_environment, same_value
from simpletuner.config.option import LIMITS, Group, Option, describe, options_of
from simpletuner.config.types import plain_key
from simpletuner.errors import Kind, Problem, Problems, did_you_mean, nearest
from simpletuner.redaction import hide_secrets

# Sections whose values are needed only when something is sent.
SENDING = ("Publishing", "Webhooks")
MOST_GUESSED = 50  # unknown keys that get a suggestion, each of which takes 3 ms
SAME_WORD = 0.85  # similarity of words that differ in one or two letters
# Characters of a wrong value, so that a pasted object does not bury the message.
LONGEST_SHOWN = 120
# Allowed words that are listed in full; of more, only those that resemble the wrong one.
LONGEST_CHOICE = 12
NEAREST_SHOWN = 6
# Names of PyTorch's dtypes here; a key accepts at most the first that is one of its words.
# mixed_precision no means float32.
DTYPES = {
    "float32": ("fp32", "no"),
    "fp32": ("no",),
    "float16": ("fp16",),
    "half": ("fp16",),
    "bfloat16": ("bf16",),
}
NOTHING: Mapping[str, Any] = MappingProxyType({})
# Expected types by pydantic error type, since pydantic's messages name Python types.
EXPECTED = {
    "list_type": "a list",
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type"), "an object"),
}


@dataclass(frozen=True)
class Layer:
    """Raw settings from one source.

    `label` names the source in the plan. `last_wins` is for the command line, where a repeated key
    is a correction, not a mistake.
    """

    label: str
    values: Sequence[tuple[str, Any]]
    last_wins: bool = False


def resolve(
    layers: Sequence[Layer],
    report: Problems,
    defaults: Mapping[str, Any] = NOTHING,
    fixed: Mapping[str, Any] = NOTHING,
) -> schema.RunConfig:
    """Merge the layers, later ones overriding earlier ones, and build the config.

    If a problem is fatal, the config serves only to find further problems.

    Args:
        defaults: the family's defaults, below all layers.
        fixed: values fixed by the family, above all layers.
    """
    values, origins = _merge(layers, defaults, report)
    for name, value in fixed.items():
        if name in values and not same_value(values[name], value):
            message = f"{values[name]!r} is ignored: the model fixes it to {value!r}."
            report.warn(name, f"{message} ({origins[name]})")
        values[name] = value
        origins[name] = schema.FAMILY_FIXED

    # Separate from problems whose messages already name their layer.
    invalid = Problems()
    built: dict[type[Group], Group] = {}
    for group in schema.all_groups():
        values_of_group = {name: values[name] for name in group.model_fields if name in values}
        built[group] = build_group(group, values_of_group, invalid)
    for problem in invalid:
        report.append(_with_origin(problem, origins))

    groups = {attribute: built[group] for attribute, group in schema.GROUPS.items()}
    techniques: dict[type[Group], Group] = {
        group: built[group] for group in schema.technique_groups()
    }
    families = {group: built[group] for group in schema.family_groups()}
    # `GROUPS` is read from RunConfig's annotations, so the names match; mypy cannot infer that.
    return schema.RunConfig(
        **cast(Any, groups),
        techniques=schema.TechniqueOptions(techniques),
        family=schema.FamilyOptions(families),
        origins={name: origins.get(name, "default") for name in schema.all_options()},
    )


def _merge(
    layers: Sequence[Layer], defaults: Mapping[str, Any], report: Problems
) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of every key that is set, and the label of its layer."""
    values = dict(defaults)
    origins = dict.fromkeys(defaults, schema.FAMILY_DEFAULT)
    for layer in layers:
        for name, value in canonical(layer, report).items():
            if value is not None:
                values[name] = value
                origins[name] = layer.label
            elif name in defaults:  # unset, overriding the user's lower-priority layers
                values[name] = defaults[name]
                origins[name] = schema.FAMILY_DEFAULT
            else:
                values.pop(name, None)
                origins.pop(name, None)
    return values, origins


def build_group(
    group: type[schema.GroupType], values: Mapping[str, Any], report: Problems
) -> schema.GroupType:
    """Build a group; invalid values are reported and replaced, so that the rest is checked too."""
    try:
        return group.model_validate(values)
    except ValidationError as error:
        _report_invalid(error, group, report)
        return group.model_validate(with_stand_ins(values, error, group))


def canonical(
    layer: Layer, report: Problems, names: Mapping[str, Option] | None = None, file: File = "config"
) -> dict[str, Any]:
    """A layer's values by canonical key; None for unset.

    Strips `--`, resolves aliases and expands variables of the environment.

    Args:
        names: the known keys, by default those of config.json.
        file: kind of file, which selects the table of keys that this version does not have.
    """
    names = schema.option_names() if names is None else names
    values: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    source = f" ({layer.label})" if layer.label else ""
    # Before any message can quote a value, including that of an unknown key. Numbered, since keys
    # may repeat.
    hide_secrets({f"{number}.{written}": raw for number, (written, raw) in enumerate(layer.values)})
    unknown_keys = 0
    for written, raw in layer.values:
        key = plain_key(written)
        if key not in names:
            lowered = key.lower()  # a variable of config.env
            if is_simpletuner_default(lowered, raw, file):
                continue
            unknown_keys += 1
            problem = absent_key_problem(
                written, lowered, raw, source, file, is_typed=layer.last_wins
            )
            if problem is not None:
                report.append(problem)
                continue
            guesses = names if unknown_keys <= MOST_GUESSED else ()
            message = f"{unknown_key(lowered, guesses)}{source}"
            report.error(written, message, remedy={written: None})
            continue

        declared = names[key]
        name = declared.name
        value = _expanded(raw, declared, report)
        if value is None:
            # In a file, a null alias does not unset another spelling of the key.
            values[name] = None if layer.last_wins else values.get(name)
            continue
        if values.get(name) is not None and not same_value(values[name], value):
            first = f"{spelled[name]}={values[name]!r}"
            message = f"is given twice: {first} and {written}={value!r}{source}."
            if layer.last_wins:
                report.warn(name, f"{message} The last one is used.")
            else:
                report.error(name, message)
        values[name] = value
        spelled[name] = written
    return values


def _expanded(raw: Any, declared: Option, report: Problems) -> Any:
    """A raw value with variables of the environment expanded; None for unset."""
    value = expand_environment(
        raw,
        declared.name,
        report,
        secret=declared.may_hold_secret,
        # Planning works without these variables; `check_unset` warns.
        keep_unset=declared.section in SENDING,
    )
    if value != "":
        return value
    # An empty resume_from_checkpoint requests a new run; unset means latest.
    return "none" if declared.name == "resume_from_checkpoint" else None


def _with_origin(problem: Problem, origins: Mapping[str, str]) -> Problem:
    """The problem, with the source of its value appended to the message."""
    # `webhook_config[0].webhook_url` uses the origin of webhook_config.
    origin = origins.get(re.split(r"[.\[]", problem.where)[0])
    return replace(problem, message=f"{problem.message} ({origin})") if origin else problem


def _report_invalid(error: ValidationError, model: type[Group], report: Problems) -> None:
    """Report one error per mistake, with key, value, allowed values and the nearest spelling."""
    seen: set[str] = set()
    for details in error.errors():
        path = _key_path(details)
        if path in seen:  # pydantic reports every member of a union; the first is enough
            continue
        seen.add(path)
        kind: Kind | None = "required" if details["type"] == "missing" else None
        report.error(path, _sentence(details, path, model), kind=kind)


def with_stand_ins(
    values: Mapping[str, Any], error: ValidationError, model: type[Group]
) -> dict[str, Any]:
    """Replace invalid values, so that the model can be built and the rest checked.

    A misspelt word becomes the nearest allowed word. A required key that is missing or invalid gets
    the first allowed word or an empty text. Any other invalid key falls back to its default.
    """
    # The caller reports the invalid values.
    result = dict(values)
    for details in error.errors():
        name = str(details["loc"][0])
        result.pop(name, None)
        field = model.model_fields.get(name)
        if field is None:
            continue
        guess = None
        # A nested word is part of a list or object, which is dropped as a whole.
        if details["type"] == "literal_error" and len(details["loc"]) == 1:
            # A misspelt word must not hide problems of the intended word.
            guess = nearest(str(details["input"]), _allowed(details))
        if guess is not None:
            result[name] = guess
        elif field.is_required():
            words = get_args(field.annotation)
            result[name] = words[0] if words else ""
    return result


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The message for an unknown key, with the nearest known key.

    Long names resemble each other through shared words (`deepspeed_config`, `tread_config`), so the
    guess must also start alike, unless they differ in only one or two letters.
    """
    message = "is not a known key."
    guess = nearest(key, known)
    if guess is None:
        return message
    starts_alike = guess[:2] == key[:2]
    if starts_alike or nearest(key, [guess], cutoff=SAME_WORD) is not None:
        message += did_you_mean(key, [guess])
    return message


def _key_path(details: ErrorDetails) -> str:
    """The place of an error as users write it: `video.num_frames` or `instance_prompt[1]`."""
    path = ""
    for part in details["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        # pydantic names the members of a union: function-before[parse_text(), str].
        elif part.isidentifier():
            path += f".{part}" if path else part
    return path


def _sentence(details: ErrorDetails, path: str, model: type[Group]) -> str:
    """The message of an error in words for users, without the key."""
    kind = details["type"]
    value = details["input"]
    context = details.get("ctx", {})
    shown = repr(value)
    if len(shown) > LONGEST_SHOWN:
        shown = f"{shown[:LONGEST_SHOWN]}..."
    if kind == "missing":
        field = model.model_fields.get(path)
        explained = describe(path, model, field).help if field else ""
        return f"is required. {explained}".strip()
    if kind == "too_short":
        return "is empty; at least one entry is needed."
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(path.rpartition(".")[2], _known_keys(model))
    if kind == "literal_error":
        return f"{shown} {_why_not(details, path, model)}"
    for limit in context.keys() & LIMITS.keys():  # one at most
        return f"{shown} is out of range; it must be {LIMITS[limit]} {context[limit]:.10g}."
    if kind == "value_error":
        return f"{shown} {context['error']}."
    if kind in EXPECTED:
        return f"{shown} is not {EXPECTED[kind]}."
    return f"{shown}: {details['msg']}."


def _why_not(details: ErrorDetails, path: str, model: type[Group]) -> str:
    """Why a key does not accept a word."""
    word = str(details["input"])
    allowed = _allowed(details)
    options = options_of(model)
    why = why_no_value(path, word)
    if not why and path in options:
        why = options[path].refused.get(word, "")
    if why:
        return f"{why}."
    hint = did_you_mean(word, allowed)
    for name in DTYPES.get(word.lower().removeprefix("torch."), ()):
        if name in allowed:
            hint = f" Did you mean '{name}'?"
            break
    if len(allowed) > LONGEST_CHOICE:
        near = difflib.get_close_matches(word, allowed, n=NEAREST_SHOWN, cutoff=0)
        rest = len(allowed) - len(near)
        advice = f"`simpletuner help {path}` lists all."
        return f"is not one of: {', '.join(near)} and {rest} more.{hint} {advice}"
    return f"is not one of: {', '.join(allowed)}.{hint}"


def _allowed(details: ErrorDetails) -> list[str]:
    """The words of a `literal_error`."""
    expected = str(details.get("ctx", {})["expected"])  # 'a', 'b' or 'c'
    return [word.strip("' ") for word in expected.replace(" or ", ", ").split(",")]


def _known_keys(model: type[Group]) -> list[str]:
    """The keys of nested objects in a model, as users write them."""
    described = model.model_json_schema()
    keys: list[str] = []
    for structure in described.get("$defs", {}).values() or [described]:
        keys += structure.get("properties", ())
    return keys
