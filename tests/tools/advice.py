"""Reads the settings that a message proposes, and follows them."""

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
    """The changes that solve a problem according to its remedy and its words, each an alternative
    to the others.

    A key with the value None is to be left out.
    """
    found = [dict(problem.remedy)] if problem.remedy else []
    key = problem.where.rpartition(".")[2]
    for sentence in SENTENCE.split(problem.message):
        start = PROPOSAL.search(sentence)
        leaves_out = OMISSION.search(sentence)
        if start is None and leaves_out is None:
            continue
        words = sentence[min(match.start() for match in (start, leaves_out) if match is not None) :]
        for alternative in re.split(r",? or ", words):
            change: dict[str, Any] = {}
            for part in re.split(r",? and ", alternative):
                change |= {key: None} if OMISSION.search(part) else _setting(part, key, options)
            found += [change] if change else []
    if "cannot be combined with" in problem.message and not found:
        found.append({key: None})
    return found


def _setting(words: str, where: str, options: Options) -> dict[str, Any]:
    """The setting at the start of a clause: `KEY VALUE`, a bare flag, or a value of the key that is
    wrong.
    """
    first, _, rest = PROPOSAL.sub("", words).strip().partition(" ")
    first = first.strip("'`,.;")
    second = rest.partition(" ")[0].strip("'`,.;")
    if first in options:
        value = _value(options[first], second)
        return {} if value is None else {first: value}
    if where not in options:
        return {}
    is_number = options[where].type_name in ("integer", "number") and NUMBER.fullmatch(first)
    return {where: first} if first in options[where].choices or is_number else {}


def _value(option: Option, written: str) -> Any:
    """The value that follows a key; true for a flag without one."""
    if option.is_flag:
        return written.lower() not in ("false", "off")
    is_valid = written in option.choices if option.choices else NUMBER.fullmatch(written)
    return written if is_valid else None


def refused_next(
    settings: Settings, problems: Sequence[Problem], judge: Judge, options: Options
) -> Iterator[str]:
    """Every proposal that is refused: it solves nothing, or leads to a problem that was not
    reported before.
    """
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
    """Whether somebody who follows one proposal for every problem, again and again, gets rid of all
    of them.

    Of several alternatives, it is enough that one leads there; none may lead in a circle only.
    """
    alternatives = [
        changes for problem in judge(settings) if (changes := proposals(problem, options))
    ]
    if not alternatives:
        return True
    for choice in islice(product(*alternatives), MOST_CHOICES) if rounds else ():
        merged = {key: value for change in choice for key, value in change.items()}
        after = changed(settings, merged)
        if after != settings and comes_to_an_end(after, judge, options, rounds - 1):
            return True
    return False
