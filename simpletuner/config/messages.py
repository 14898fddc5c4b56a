"""Translate pydantic's validation errors into problems that a user can act on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from simpletuner.errors import Problem, did_you_mean, nearest

LONGEST_SHOWN = 120
OBJECT = "an object"
EXPECTED = {"list_type": "a list", "dict_type": OBJECT, "model_type": OBJECT, "dataclass_type": OBJECT}


def problems_of(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[Problem]:
    """One `Problem` per mistake, each with key, value, what is allowed and the nearest spelling."""
    problems: dict[str, Problem] = {}
    for details in error.errors():
        path = _key_path(details)
        # pydantic reports every member of a union; the first one is enough.
        problems.setdefault(path, Problem(prefix + path, _sentence(details, path, model)))
    return list(problems.values())


def with_stand_ins(values: Mapping[str, Any], error: ValidationError, model: type[BaseModel]) -> dict[str, Any]:
    """The values without invalid ones, so that the model can be built and the rest be checked.

    A misspelt word becomes the nearest allowed one, a required key that is missing or invalid gets the first allowed
    word or an empty text; any other invalid key falls back to its default.
    """
    result = dict(values)
    for details in error.errors():
        name = str(details["loc"][0])
        result.pop(name, None)
        field = model.model_fields.get(name)
        if field is None:
            continue
        guess = nearest(str(details["input"]), _allowed(details)) if details["type"] == "literal_error" else None
        if guess is not None and len(details["loc"]) == 1:
            result[name] = guess
        elif field.is_required():
            result[name] = next(iter(get_args(field.annotation)), "")
    return result


def unknown_key(key: str, known: list[str]) -> str:
    """The message for an unknown key, with the nearest known one.

    Long names look alike because of shared words (`deepspeed_config`, `tread_config`), so the guess must also start
    alike, unless all but a letter or two are the same.
    """
    guess = nearest(key, known)
    meant = guess is not None and (guess[:2] == key[:2] or nearest(key, [guess], cutoff=0.85) is not None)
    return f"is not a known key.{did_you_mean(key, [guess]) if guess and meant else ''}"


def _key_path(details: ErrorDetails) -> str:
    """`video.num_frames` or `instance_prompt[1]`, without pydantic's names for the members of a union."""
    path = ""
    for part in details["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    return path


def _sentence(details: ErrorDetails, path: str, model: type[BaseModel]) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    shown = _shown(value)
    if kind == "missing":
        return f"is required. {_help(model, path)}".strip()
    if kind == "too_short":
        return "is empty; at least one entry is needed."
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(path.rpartition(".")[2], _known_keys(model, path))
    if kind == "literal_error":
        allowed = _allowed(details)
        return f"{shown} is not one of: {', '.join(allowed)}.{did_you_mean(str(value), allowed)}"
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        sign = {"greater_than_equal": "≥", "greater_than": ">", "less_than_equal": "≤", "less_than": "<"}[kind]
        bound = next(iter(context.values()))
        return f"{shown} is out of range; it must be {sign} {bound:g}."
    if kind in ("value_error", "too_large"):
        return f"{shown} {context['error'] if kind == 'value_error' else details['msg']}."
    expected = EXPECTED.get(kind)
    return f"{shown} is not {expected}." if expected else f"{shown}: {details['msg']}."


def _allowed(details: ErrorDetails) -> list[str]:
    """The words of a `literal_error`."""
    expected = str(details.get("ctx", {})["expected"])
    return [word.strip("' ") for word in expected.replace(" or ", ", ").split(",")]


def _shown(value: object) -> str:
    """The `repr` of a value, cut if it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _help(model: type[BaseModel], path: str) -> str:
    field = model.model_fields.get(path)
    return field.description or "" if field else ""


def _known_keys(model: type[BaseModel], path: str) -> list[str]:
    """The known keys of the object that `path` leads to."""
    keys = _fields(model)
    for part in path.split(".")[:-1]:
        inner = next(filter(_is_structure, _types_in(keys[part.partition("[")[0]])))
        keys = _fields(inner)
    return list(keys)


def _fields(structure: Any) -> dict[str, Any]:
    """Keys of a group or a dataclass, as written in a config, with their types."""
    if issubclass(structure, BaseModel):
        return {field.alias or name: field.annotation for name, field in structure.model_fields.items()}
    hints = get_type_hints(structure, include_extras=True)
    return {_alias(hints[field.name]) or field.name: hints[field.name] for field in dataclasses.fields(structure)}


def _alias(annotation: Any) -> str | None:
    return next((each.alias for each in get_args(annotation) if isinstance(each, FieldInfo)), None)


def _is_structure(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def _types_in(annotation: Any) -> Iterator[Any]:
    """An annotation and its parts: `list[Route]`, then `Route`."""
    yield annotation
    for inner in get_args(annotation):
        yield from _types_in(inner)
