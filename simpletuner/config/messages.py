"""From what pydantic noticed to what a person can act on."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from simpletuner.errors import Problem, did_you_mean


def problems_of(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[Problem]:
    """One `Problem` per mistake, each with key, value, what is allowed and the nearest spelling."""
    problems: dict[str, Problem] = {}
    for details in error.errors():
        path = _key_path(details)
        problems.setdefault(path, Problem(prefix + path, _sentence(details, path, model)))
    return list(problems.values())


def unknown_key(key: str, known: list[str]) -> str:
    return f"is not a known key.{did_you_mean(key, known)}"


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
    shown = repr(value)
    if kind == "missing":
        return f"is required. {_help(model, path)}".strip()
    if kind == "extra_forbidden":
        return unknown_key(path.rpartition(".")[2], _known_keys(model, path))
    if kind == "literal_error":
        allowed = [word.strip("' ") for word in str(context["expected"]).replace(" or ", ", ").split(",")]
        return f"{shown} is not one of: {', '.join(allowed)}.{did_you_mean(str(value), allowed)}"
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        sign = {"greater_than_equal": "≥", "greater_than": ">", "less_than_equal": "≤", "less_than": "<"}[kind]
        bound = next(iter(context.values()))
        return f"{value!r} is out of range; it must be {sign} {bound:g}."
    if kind == "value_error":
        return f"{shown} {context['error']}."
    expected = {"list_type": "a list", "dict_type": "an object", "model_type": "an object"}.get(kind)
    return f"{shown} is not {expected}." if expected else f"{shown}: {details['msg']}."


def _help(model: type[BaseModel], path: str) -> str:
    field = model.model_fields.get(path)
    return field.description or "" if field else ""


def _known_keys(model: type[BaseModel], path: str) -> list[str]:
    inner: Any = model
    for part in path.split(".")[:-1]:
        annotation = inner.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        inner = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(inner.model_fields)
