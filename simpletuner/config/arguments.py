"""Settings on the command line of `simpletuner train`: `key=value`, `--key=value`, `--key value` and bare `--flag`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from simpletuner.config.load import Layer
from simpletuner.config.schema import option_names
from simpletuner.config.values import plain_key
from simpletuner.errors import Problem

if TYPE_CHECKING:
    from simpletuner.data.context import Collect

EXTRA_ARGUMENTS = "TRAINER_EXTRA_ARGS"
COMMAND_LINE = "command line"  # the origin of what is given there
# Arguments that choose the config and are not settings themselves, by the name they are stored under.
SELECTORS = {
    "env": "env",
    "example": "example",
    "config": "config_path",
    "config_path": "config_path",
    "config_backend": "config_backend",
}


@dataclass
class Arguments:
    """The parsed command line.

    Attributes:
        settings: keys and values in the order given; a bare flag has the value True.
        selectors: `env`, `example` and the like.
        collect: the door to remote datasets, see `DataContext.collect`.
    """

    settings: list[tuple[str, object]] = field(default_factory=list)
    selectors: dict[str, str] = field(default_factory=dict)
    collect: Collect | None = None

    def extended(self, extra: str, problems: list[Problem]) -> Arguments:
        """These arguments followed by those of a config.env."""
        more = parse_arguments([], problems, extra)
        return replace(self, settings=[*self.settings, *more.settings])

    def with_seed(self, seed: int | None) -> Arguments:
        """These arguments with the seed that another process drew, if it is known."""
        return self if seed is None else replace(self, settings=[*self.settings, ("seed", str(seed))])

    def layer(self) -> Layer:
        """The settings as the layer with the highest priority; `null` unsets a key, as in JSON."""
        values = [(key, None if value == "null" else value) for key, value in self.settings]
        return Layer(COMMAND_LINE, values, last_wins=True)


def parse_arguments(tokens: Sequence[str], problems: list[Problem], extra: str | None = None) -> Arguments:
    """Parse the command line, followed by TRAINER_EXTRA_ARGS (or `extra` instead), split at white space."""
    arguments = Arguments()
    more = os.environ.get(EXTRA_ARGUMENTS, "") if extra is None else extra
    everything = [*tokens, *more.split()]
    position = 0
    while position < len(everything):
        token = everything[position]
        position += 1
        key, equals, value = token.partition("=")
        if not key.lstrip("-") or (not equals and not token.startswith("--")):
            problems.append(Problem(token, "is not a setting; write key=value, --key value or --flag."))
            continue
        following = everything[position] if position < len(everything) else None
        if equals:
            given: object = value
        elif following is not None and _is_value(following, key):
            given = following
            position += 1
        else:
            given = True
        _keep(arguments, key, given, problems)
    return arguments


def _keep(arguments: Arguments, key: str, value: object, problems: list[Problem]) -> None:
    name = plain_key(key)
    if name not in SELECTORS:
        arguments.settings.append((key, value))
    elif value is True:
        problems.append(Problem(key, "needs a value after it."))
    else:
        arguments.selectors[SELECTORS[name]] = str(value)


def _is_value(token: str, key: str) -> bool:
    """Whether a token is the value of the `--key` before it, and not another option or setting.

    A negative number is a value. So is text with an equals sign, unless a known key precedes the sign or `key` is a
    flag, which needs no value.
    """
    if token.startswith("--"):
        return False
    word, equals, _ = token.partition("=")
    if not equals:
        return True
    names = option_names()
    option = names.get(plain_key(key))
    return plain_key(word) not in {*names, *SELECTORS} and not (option is not None and option.is_flag)
