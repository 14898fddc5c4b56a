"""Follows the advice of messages: reads the settings that they propose, and applies them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

from simpletuner.config.option import Option
from simpletuner.errors import Problem

Settings = Mapping[str, Any]
Options = Mapping[str, Option]
Judge = Callable[[Settings], list[Problem]]
# Clauses that propose something: "use bf16", "set offload auto", "needs model_type lora", "leave it
# out".
PROPOSAL = re.compile(
    r"\b(?:use|set it to|set|needs|it must be|the nearest supported value is) ", re.IGNORECASE
)
SENTENCE = re.compile(r"[.;:] |\.$")
OMISSION = re.compile(r"\bleave it out\b|\bremove it\b", re.IGNORECASE)
MOST_CHOICES = 8  # combinations of alternatives that are tried in a round
NUMBER = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")


def proposals(problem: Problem, options: Options) -> list[dict[str, Any]]:
    """The alternative changes that solve a problem, according to its remedy and its words.

    A key with the value None is to be left out.
    """
    changes = [dict(problem.remedy)] if problem.remedy else []
    key = problem.where.rpartition(".")[2]
    for sentence in SENTENCE.split(problem.message):
        matches = [PROPOSAL.search(sentence), OMISSION.search(sentence)]
        starts = [match.start() for match in matches if match is not None]
        if not starts:
            continue
        for alternative in re.split(r",? or ", sentence[min(starts) :]):
            change: dict[str, Any] = {}
            for part in re.split(r",? and ", alternative):
                if OMISSION.search(part):
                    change[key] = None
                else:
                    change |= _setting(part, key, options)
            if change:
                changes.append(change)
    if "cannot be combined with" in problem.message and not changes:
        changes.append({key: None})
    return changes


def _setting(clause: str, key: str, options: Options) -> dict[str, Any]:
    """The setting at the start of a clause: `KEY VALUE`, a flag, or another value of the key."""
    first, _, rest = PROPOSAL.sub("", clause).strip().partition(" ")
    first = first.strip("'`,.;")
    second = rest.partition(" ")[0].strip("'`,.;")
    if first in options:
        value = _value(options[first], second)
        return {} if value is None else {first: value}
    if key not in options:
        return {}
    option = options[key]
    is_number = option.type_name in ("integer", "number") and NUMBER.fullmatch(first)
    return {key: first} if first in option.choices or is_number else {}


def _value(option: Option, written: str) -> Any:
    """The value that follows a key; true for a flag without one."""
    if option.is_flag:
        return written.lower() not in ("false", "off")
    is_valid = written in option.choices if option.choices else NUMBER.fullmatch(written)
    return written if is_valid else None


def refused_next(
    settings: Settings, problems: Sequence[Problem], judge: Judge, options: Options
) -> Iterator[str]:
    """Every proposal that does not solve its problem, or causes one that was not reported."""
    known = {in_general(problem) for problem in problems}
    for problem in problems:
        for change in proposals(problem, options):
            for remaining in judge(changed(settings, change)):
                if remaining == problem or in_general(remaining) not in known:
                    yield (
                        f"{dict(settings)}\n  {problem}\n  followed with {change}, then:\n  "
                        f"{remaining}"
                    )


def changed(settings: Settings, change: Settings) -> dict[str, Any]:
    """The settings after a proposal."""
    return {key: value for key, value in {**settings, **change}.items() if value is not None}


def in_general(problem: Problem) -> str:
    """A problem without its values."""
    return re.sub(r"'[^']*'|\d+", "...", f"{problem.where}: {problem.message}")


def comes_to_an_end(settings: Settings, judge: Judge, options: Options, rounds: int) -> bool:
    """Whether following one proposal for every problem, round after round, solves all of them.

    It is enough that one of several alternatives leads there.
    """
    alternatives = []
    for problem in judge(settings):
        changes = proposals(problem, options)
        if changes:
            alternatives.append(changes)
    if not alternatives:
        return True
    if rounds == 0:
        return False
    for choice in islice(product(*alternatives), MOST_CHOICES):
        merged: dict[str, Any] = {}
        for change in choice:
            merged |= change
        after = changed(settings, merged)
        if after != settings and comes_to_an_end(after, judge, options, rounds - 1):
            return True
    return False
