"""How a key is declared with `option()`, and the `Option` that help and checks read.

An attribute of a group declares a key once: the annotation is its type, `option()` sets its
default, limits and conditions, and the docstring below is its help. The command line, `--help`, the
wizard, the reference page and the loader all read this declaration.
"""

from __future__ import annotations

import ast
import functools
import importlib.machinery
import importlib.util
import inspect
import itertools
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypedDict, Unpack, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from simpletuner.errors import Problems

# Above any sensible number of steps, weights or pixels: catches typos that would cost days or
# gigabytes.
LARGEST_NUMBER = 1_000_000_000
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
JSON_OR_FILE = "JSON or file"  # form of keys that also accept the path of a JSON file


@dataclass(frozen=True)
class When:
    """A condition on the settings: at least one of these keys has one of its values.

    Attributes:
        keys: allowed values by key; without values, the key must be on: not false, 0 or unset.
        negated: the condition holds if no key matches.
        because: the reason, for messages.
        fatal: setting a key whose condition does not hold is an error instead of having no effect.
        also: a further condition; written `when(...) & when(...)`.
    """

    keys: Mapping[str, tuple[object, ...]]
    negated: bool
    because: str
    fatal: bool
    also: When | None = None

    def __and__(self, other: When) -> When:
        return replace(self, also=other)

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether the settings, by key, meet the condition."""
        matches = any(
            settings[key] in values if values else settings[key]
            for key, values in self.keys.items()
        )
        if matches == self.negated:
            return False
        return self.also is None or self.also.holds(settings)

    def __str__(self) -> str:
        alternatives = []
        for key, values in self.keys.items():
            words = _joined_by_or([str(value) for value in values])
            alternatives.append(f"{key} {words}".strip())
        return _joined_by_or(alternatives)

    @property
    def stated(self) -> str:
        """The condition in words, with all its parts."""
        words = str(self)
        if self.negated:
            # "lr_scheduler linear or sine" becomes "lr_scheduler other than linear or sine".
            words = words.replace(" ", " other than ", 1)
        return f"{words} with {self.also.stated}" if self.also else words

    def shown(self, settings: Mapping[str, Any]) -> str:
        """The keys, those with listed values followed by their value in these settings."""
        keys = [f"{key} {settings[key]}" if values else key for key, values in self.keys.items()]
        return " and ".join(keys)

    @functools.cached_property  # read for hundreds of keys whenever a setting changes
    def lacking(self) -> str:
        """The message about a key whose condition does not hold."""
        if self.fatal:
            return f"needs {self}{self.reason}."
        if self.reason:
            return f"has no effect{self.reason}."
        return f"has no effect {'with' if self.negated else 'without'} {self}."

    @property
    def reason(self) -> str:
        return f": {self.because}" if self.because else ""


def _joined_by_or(words: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`; empty for no words."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} or {words[-1]}"


def when(*keys: str, because: str = "", fatal: bool = False, **values: object) -> When:
    """One of the keys is on or has its value, which may be a tuple of values; see `When`."""
    allowed: dict[str, tuple[object, ...]] = dict.fromkeys(keys, ())
    for key, value in values.items():
        allowed[key] = value if isinstance(value, tuple) else (value,)
    return When(allowed, negated=False, because=because, fatal=fatal)


def unless(*keys: str, because: str = "", **values: object) -> When:
    """The opposite of `when`."""
    return replace(when(*keys, because=because, fatal=False, **values), negated=True)


Conditions = tuple[When, ...]


class Group(BaseModel):
    """Base of all config groups: immutable, and undeclared keys are errors.

    Attributes:
        requires: condition of all keys of the group, except the keys in the condition.
    """

    requires: ClassVar[When | None] = None
    model_config = ConfigDict(frozen=True, extra="forbid")


class TechniqueGroup(Group):
    """The keys of a technique; its rules are in `planning.techniques`."""

    @property
    def late(self) -> Mapping[str, str]:
        """Keys that hold a step, and the consequence if the run ends before it."""
        return {}

    @property
    def related(self) -> Sequence[str]:
        """Keys of other groups that the technique's result depends on."""
        return ()


class OptionWords(TypedDict, total=False):
    """The arguments of `option` besides the default.

    Attributes:
        ge, gt, le, lt: limits of a number; with a lower limit, the upper limit defaults to
            `LARGEST_NUMBER`.
        aliases: other spellings of the key.
        default_note: the default on the reference page, if it depends on other settings.
        form: the type on the reference page, if the written type differs from the parsed type.
        requires: conditions without which the key has no effect; they replace the group's
            conditions on the same keys.
        excludes: conditions under which the key must not be on.
        refused, remarks: values that are an error, or get a warning, with the message.
        label: the name on the page, if the words of the key are not enough.
        common: a key for first-time users; the page shows all other keys below "More".
    """

    ge: float
    gt: float
    le: float
    lt: float
    aliases: tuple[str, ...]
    default_note: str
    form: str
    requires: When | Conditions
    excludes: When | Conditions
    refused: Mapping[Any, str]
    remarks: Mapping[Any, str]
    label: str
    common: bool


def option(default: Any = ..., **words: Unpack[OptionWords]) -> Any:
    """Declare one key. Its help is the docstring below it, one or two sentences.

    Args:
        default: the global default; `...` makes the key required.
        words: see `OptionWords`.
    """
    extra: dict[str, Any] = {**words}
    limits = {name: extra.pop(name) for name in LIMITS if name in extra}
    # Infinity, which lifts the default limit, is not shown as one.
    extra["limits"] = {name: bound for name, bound in limits.items() if bound < LARGEST_NUMBER}
    for rule in ("requires", "excludes"):
        # A single condition may be written without its tuple.
        if isinstance(extra.get(rule), When):
            extra[rule] = (extra[rule],)
    # No default upper limit without a lower one: numbers such as Sana's motion score are not
    # amounts.
    if limits and not limits.keys() & {"le", "lt"}:
        limits["le"] = LARGEST_NUMBER
    # pydantic stores the rest in json_schema_extra; `describe` reads it back.
    return Field(default, json_schema_extra=extra, **limits)


common = functools.partial(option, common=True)


def accepted(default: Any, reason: str, **limits: float) -> Any:
    """Declare a key of other trainers that has no effect here, with the reason."""
    # A condition on no key never holds, so the key never has an effect.
    return option(default, requires=when(because=reason), **cast(Any, limits))


@functools.cache
def _docstrings(module: str) -> Mapping[tuple[str, str], str]:
    """The docstrings below the attributes of a module's classes, by class and attribute.

    Read from the source when help is requested, since Python does not keep attribute docstrings.
    """
    docstrings = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for group in tree.body:
        if not isinstance(group, ast.ClassDef):
            continue
        for pair in itertools.pairwise(group.body):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docstrings[group.name, name] = inspect.cleandoc(text).replace("\n", " ")
    return docstrings


@dataclass(frozen=True)
class Option:
    """One declared key; most attributes are those of `OptionWords`.

    Attributes:
        section: title of its section on the reference page: the docstring of its group.
        limits: limits of a number as declared, without the default upper limit.
        parsers: the functions that parse what users write.
    """

    name: str
    section: str
    group: type[Group]
    default: Any
    required: bool
    annotation: Any
    limits: dict[str, float]
    parsers: tuple[Callable[..., Any], ...]
    requires: Conditions = ()
    excludes: Conditions = ()
    refused: Mapping[Any, str] = field(default_factory=dict)
    remarks: Mapping[Any, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    default_note: str = ""
    form: str = ""
    label: str = ""
    common: bool = False

    @property
    def help(self) -> str:
        """One or two sentences: the key's docstring, or why it is accepted without effect."""
        attribute = self.name.rpartition(".")[2]  # of `video.num_frames`
        for owner in self.group.__mro__:  # the group may inherit the key
            if issubclass(owner, Group):
                text = _docstrings(owner.__module__).get((owner.__name__, attribute))
                if text:
                    return text
        return f"Accepted; {self.requires[0].because}."

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words of a choice, else an empty tuple."""
        base = _strip_optional(self.annotation)
        return tuple(map(str, get_args(base))) if get_origin(base) is Literal else ()

    @property
    def type_name(self) -> str:
        """The type as shown on the reference page."""
        if self.form:
            return self.form
        if self.choices:
            # A bare | would end the cell of a Markdown table.
            return " \\| ".join(f"`{word}`" for word in self.choices)
        base = _strip_optional(self.annotation)
        names = {bool: "true/false", int: "integer", float: "number", str: "text"}
        if get_origin(base) is list:
            return "list"
        return names.get(base, "JSON")

    @property
    def default_text(self) -> str:
        """The default as text, with values in backticks; empty if there is none."""
        if self.default_note:
            return self.default_note
        return "required" if self.required else as_written(self.default)

    @property
    def relations(self) -> dict[str, list[str]]:
        """Aliases and conditions on other keys, by title."""
        required = []
        ineffective = []
        for condition in self.requires:
            if condition.negated:
                ineffective.append(str(condition))
            elif condition.keys:  # a condition without keys comes from `accepted`
                required.append(str(condition))
        return {
            "Also written": list(self.aliases),
            "Requires": required,
            "No effect with": ineffective,
            "Excludes": [condition.stated for condition in self.excludes],
        }

    def has_effect(self, settings: Mapping[str, Any]) -> bool:
        """Whether settings fulfil everything that it requires."""
        return all(condition.holds(settings) for condition in self.requires)

    def conflicts(self, settings: Mapping[str, Any], report: Problems) -> None:
        """Report settings that exclude the key, if it is on, and values that are refused."""
        value = settings[self.name]
        is_on = bool(value) and value != self.default
        if is_on:  # a key that is off, or at its default, excludes nothing
            self._check_excluded(value, settings, report)
        if not self.has_effect(settings):
            return
        # Looked up only for keys with such words: the value of another may be a list, which cannot
        # be hashed.
        if self.refused and value in self.refused:
            report.error(self.name, f"{value!r} {self.refused[value]}.")
        if self.remarks and value in self.remarks:
            report.warn(self.name, f"{value!r} {self.remarks[value]}.")

    def _check_excluded(self, value: Any, settings: Mapping[str, Any], report: Problems) -> None:
        """Report settings that cannot be combined with this key."""
        shown = f"{value!r} " if isinstance(value, str) else ""
        for condition in self.excludes:
            if condition.holds(settings):
                excluded = f"{condition.shown(settings)}{condition.reason}"
                report.error(self.name, f"{shown}cannot be combined with {excluded}.")

    @functools.cached_property
    def may_hold_secret(self) -> bool:
        """Whether values from `{env:...}` are hidden: true for texts sent to external services."""
        is_sent = self.section in ("Tracking", "Publishing", "Webhooks")
        # Flags, numbers and choices are not secrets.
        return is_sent and self.type_name in ("text", "list", "JSON", JSON_OR_FILE)

    @property
    def is_flag(self) -> bool:
        return _strip_optional(self.annotation) is bool

    @property
    def part(self) -> type[Group] | None:
        """The group of an object's keys, as for `video` of a dataset; None for plain values."""
        base = _strip_optional(self.annotation)
        return base if isinstance(base, type) and issubclass(base, Group) else None

    @property
    def limit_text(self) -> str:
        return ", ".join(f"{LIMITS[name]} {bound:.10g}" for name, bound in self.limits.items())


def as_written(value: Any) -> str:
    """A value as JSON, in backticks; true and false stay bare, None is empty."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def describe(name: str, group: type[Group], info: FieldInfo) -> Option:
    """The `Option` for a group's field declared with `option()`."""
    words: dict[str, Any] = dict(cast(Any, info.json_schema_extra))
    required: Conditions = words.get("requires", ())
    # A group's switch does not require itself, and a key's condition on the switch replaces that of
    # the group.
    mentioned = {name}
    for condition in required:
        mentioned |= condition.keys.keys()
    if group.requires and not mentioned & group.requires.keys.keys():
        words["requires"] = (group.requires, *required)
    return Option(
        name=name,
        section=group.__doc__ or "",
        group=group,
        default=None if info.default is PydanticUndefined else info.default,
        required=info.is_required(),
        annotation=info.annotation,
        parsers=tuple(
            rule.func for rule in _constraints(info) if isinstance(rule, BeforeValidator)
        ),
        **words,
    )


@functools.cache
def options_of(*groups: type[Group]) -> dict[str, Option]:
    """Every key of some groups by name and by alias."""
    options: dict[str, Option] = {}
    for group in groups:
        for name, info in group.model_fields.items():
            declared = describe(name, group, info)
            options |= dict.fromkeys((declared.name, *declared.aliases), declared)
    return options


def _constraints(info: FieldInfo) -> list[Any]:
    """The metadata of a field, including that of `Annotated[...] | None`."""
    constraints = list(info.metadata)
    for part in get_args(info.annotation):
        if get_origin(part) is Annotated:
            constraints.extend(get_args(part)[1:])
    return constraints


def _strip_optional(annotation: Any) -> Any:
    """`int` from `Annotated[int, ...] | None`."""
    if get_origin(annotation) is Annotated:
        return _strip_optional(get_args(annotation)[0])
    parts = [part for part in get_args(annotation) if part is not type(None)]
    # Arguments of list and Literal are items and words, not alternatives to None.
    if get_origin(annotation) in (list, Literal) or len(parts) != 1:
        return annotation
    return _strip_optional(parts[0])


@dataclass(frozen=True)
class Package:
    """An optional dependency: the module to look for, and its requirement as in pyproject.toml."""

    module: str
    requirement: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install {shlex.quote(self.requirement)}"


def is_installed(module: str) -> bool:
    """Whether a module such as `flash_attn.cute` is installed.

    Imports nothing, since most optional packages import torch.
    """
    parent, _, child = module.partition(".")
    spec = importlib.util.find_spec(parent)
    if spec is None:
        return False
    if not child:
        return True
    # `importlib.util.find_spec` would import the parent of a submodule.
    folders = spec.submodule_search_locations
    return importlib.machinery.PathFinder.find_spec(module, folders) is not None


def check_installed(package: Package, key: str, value: str, report: Problems) -> None:
    """Report a value whose package is not installed."""
    if not is_installed(package.module):
        name = re.split("[<>=]", package.requirement)[0]
        report.error(
            key, f"{value!r} needs the package {name}, which is not installed: {package.install}"
        )
